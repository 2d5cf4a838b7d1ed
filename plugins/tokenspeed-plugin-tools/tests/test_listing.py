"""`plugins list` and `plugins info`: what is shown of sound and broken plugins, as text and as JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_site import Site
from tokenspeed_plugin_tools.origins import PUBLISHED
from tokenspeed_testing.distribution import core_range

from tokenspeed_core.cli import main

Refusal = Callable[..., str]
POLICY = "POLICY = object\n"
RAISES = "raise OSError('no disk')\n"
ROOT = Path(__file__).parents[3]


def listed(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, dict[str, Any]]:
    assert main(["plugins", "list", *words, "--json"]) == 0
    return {
        f"{each['distribution']} {each['name']}": each
        for each in json.loads(capsys.readouterr().out)
    }


@pytest.fixture
def zoo(site: Site) -> Site:
    """Install one plugin of every status."""
    site.install("sound", {"policies calm": "sound:POLICY [api1]"}, files={"sound.py": POLICY})
    site.install("raises", {"policies angry": "raises:POLICY [api1]"}, files={"raises.py": RAISES})
    site.install(
        "misspelt", {"policies odd": "misspelt:POLICY [api1]"}, files={"misspelt.py": "def\n"}
    )
    site.install(
        "tomorrow", {"policies new": "tomorrow:POLICY [api2]"}, files={"tomorrow.py": POLICY}
    )
    site.install("yesterday", {"policies old": "y:P [api1]"}, requires="tokenspeed-core<0.0.1")
    site.install("early", {"grammar g": "early:G [api1]"}, files={"early.py": "G = 1\n"})
    site.install("rude", {"policies fcfs": "rude:P [api1]"}, files={"rude.py": "P = 1\n"})
    return site


def test_the_status_of_each_is_told_from_metadata(
    zoo: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = listed(capsys)
    status = {name.partition(" ")[0]: each["status"] for name, each in found.items()}
    assert (
        status.items()
        >= {
            "sound": "ok",
            "raises": "ok",
            "misspelt": "ok",
            "tomorrow": "incompatible",
            "yesterday": "incompatible",
            "early": "unused",
            "rude": "incompatible",
        }.items()
    )
    assert found["tomorrow new"]["reason"].startswith("needs api 2 of policies")
    assert found["yesterday old"]["reason"].startswith("needs tokenspeed-core <0.0.1")
    assert (
        found["rude fcfs"]["reason"] == "the name fcfs is built in; its author must choose another"
    )
    assert not {"sound", "raises", "early"} & set(sys.modules)
    monkeypatch.setenv("TOKENSPEED_PLUGINS", "-sound")
    assert listed(capsys)["sound calm"]["status"] == "disabled"
    monkeypatch.delenv("TOKENSPEED_PLUGINS")
    assert listed(capsys, "--no-plugins")["sound calm"]["reason"] == "left out by --no-plugins"


def test_loading_finds_those_that_fail_and_imports_nothing_here(
    zoo: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    found = listed(capsys, "--load", "--kind", "policies")
    assert found["sound calm"]["status"] == "ok"
    assert (found["raises angry"]["status"], found["raises angry"]["reason"]) == (
        "failed",
        "OSError: no disk",
    )
    assert found["misspelt odd"]["reason"].startswith("SyntaxError")
    assert found["tomorrow new"]["status"] == "incompatible"
    assert not {"sound", "raises"} & set(sys.modules)


def test_a_plugin_whose_import_ends_the_process_or_hangs_up_harms_nobody(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    site.install(
        "deadly", {"policies d": "deadly:P [api1]"}, files={"deadly.py": "import os\nos._exit(3)\n"}
    )
    site.install(
        "noisy", {"policies n": "noisy:P [api1]"}, files={"noisy.py": "print('noise')\nP = dict\n"}
    )
    found = listed(capsys, "--load", "--kind", "policies")
    assert found["deadly d"]["reason"].startswith("its import ended the process with status 3")
    assert found["noisy n"]["status"] == "ok"


def test_the_table_says_who_published_what_and_is_cut_to_a_kind(
    zoo: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (zoo.path / "sound-1.0.dist-info" / "direct_url.json").write_text(
        '{"url": "file:///home/me/sound", "dir_info": {"editable": true}}'
    )
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["plugins", "list", "--kind", "policies"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["NAME", "VERSION", "KIND", "API", "PROVIDES", "STATUS", "ORIGIN"]
    rows = {line.split()[0]: line for line in lines[1:] if line}
    assert rows["sound"].endswith("third party, editable /home/me/sound")
    assert "early" not in rows
    assert "raises" in rows


def test_what_is_called_default_is_what_stays_without_plugins(
    site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    who = {
        "tokenspeed-chat": "TokenSpeed (default)",
        "tokenspeed-kernels-hopper": "TokenSpeed",
        "tokenspeed-models-of-acme": "third party",
    }
    for name in who:
        site.install(name, {f"models {name}": "nowhere:M [api1]"})
    found = {
        each["distribution"]: each
        for each in listed(capsys, "--kind", "models", "--no-plugins").values()
    }
    assert {
        name: (each["publisher"], each["is_default"]) for name, each in found.items() if name in who
    } == {
        name: (word.removesuffix(" (default)"), word.endswith("(default)"))
        for name, word in who.items()
    }
    assert all((each["status"] == "ok") == each["is_default"] for each in found.values())
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["plugins", "list", "--kind", "models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, word in who.items():
        (row,) = (line for line in lines if line.split()[:1] == [name])
        assert row.split("  ")[-1].strip().startswith(word)


def test_a_kind_of_which_nothing_is_installed_is_refused(site: Site, refusal: Refusal) -> None:
    assert "--kind nonsense: nothing of this kind is installed; there is " in refusal(
        "plugins", "list", "--kind", "nonsense"
    )
    site.install(
        "expert", {"kernels.moe fast": "expert:SPEC [api1]", "policies calm": "expert:P [api1]"}
    )
    assert "did you mean policies? there is " in refusal("plugins", "list", "--kind", "policie")
    assert "did you mean kernels.moe? there is " in refusal("plugins", "list", "--kind", "moe")


def test_what_holds_for_all_of_a_distribution_is_said_once(
    site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    site.install(
        "much",
        {"kernels.moe fast": "m:S [api1]", "models New": "m:M [api1]", "grammar g": "m:G [api1]"},
    )
    monkeypatch.setenv("TOKENSPEED_PLUGINS", "-much")
    assert main(["plugins", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("much") and ": " in line] == [
        "much: left out by TOKENSPEED_PLUGINS=-much"
    ]
    monkeypatch.setenv("TOKENSPEED_PLUGINS", "-much:models")
    assert main(["plugins", "list"]) == 0
    told = [
        line
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("much") and ": " in line
    ]
    assert "much models (New): left out by TOKENSPEED_PLUGINS=-much:models" in told
    assert len(told) > 1


def test_info_tells_what_one_distribution_is_and_what_its_import_costs(
    zoo: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plugins", "info", "sound", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["name"], record["version"], record["publisher"]) == (
        "sound",
        "1.0",
        "third party",
    )
    assert record["is_editable"] is False
    assert record["import_ms"] > 0
    assert len(record["sha256"]) == 64
    assert [(each["kind"], each["name"], each["status"]) for each in record["provides"]] == [
        ("policies", "calm", "ok"),
    ]
    assert main(["plugins", "info", "calm"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("sound 1.0\n  origin   third party, installed\n")
    assert main(["plugins", "info", "raises"]) == 0
    assert "failed: OSError: no disk" in capsys.readouterr().out
    assert main(["plugins", "info", "tomorrow"]) == 0
    assert "incompatible: needs api 2 of policies" in capsys.readouterr().out


def test_info_names_the_modules_that_kernels_need_and_how_to_get_them(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = (
        "from tokenspeed_core.api import Capability, KernelSpec\n"
        "SPEC = KernelSpec(op='attention', backend='vendor', capability=Capability(('cuda',), ('bfloat16',)),\n"
        "                  load='vendor_plugin:make', requires=('no_such_library',), obtain='pip install it')\n"
    )
    site.install(
        "vendor-plugin",
        {"kernels.attention vendor": "vendor_plugin:SPEC [api1]"},
        files={"vendor_plugin.py": spec},
    )
    assert main(["plugins", "info", "vendor-plugin"]) == 0
    assert "needs    no_such_library (missing: pip install it)" in capsys.readouterr().out
    assert main(["plugins", "info", "vendor-plugin", "--json"]) == 0
    needed = json.loads(capsys.readouterr().out)["required_modules"]
    assert needed == {"no_such_library": {"is_installed": False, "obtain": "pip install it"}}


def test_a_name_cannot_steer_the_terminal(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.install(
        "evil",
        {"policies \x1b[31mred": "evil:P [api1]"},
        files={"evil.py": "raise OSError('\\x1b[2J')\n"},
    )
    for words in (("list", "--load"), ("info", "evil"), ("doctor",)):
        main(["plugins", *words])
        said = capsys.readouterr().out
        assert "\x1b" not in said
        assert "\\x1b[31mred" in said


OP = """
from tokenspeed_core.api import Capability, KernelSpec, OpContract, Tolerance
TURN = OpContract("turn", "rope", "(x [T, H]) -> y [T, H]", {"size": "elements of a row"}, "turning.ref:turn",
                  "turning.inputs:turn", (Tolerance("float32", 0.5, 0.25, "a guess"),), mutates=("x",))
ON_CPU = Capability(("cpu",), ("float32",))
TURNS = (KernelSpec("turn", "slow", ON_CPU, "json:loads"), KernelSpec("greedy", "slow", ON_CPU, "json:loads"))
"""


@pytest.fixture
def turning(site: Site) -> None:
    """Install an op and kernels of it, one of an op of the core."""
    entries = {"ops turning": "turning:TURN [api1]", "kernels.rope slow": "turning:TURNS [api1]"}
    site.install("turning", entries, files={"turning.py": OP})


def test_the_ops_are_listed_with_who_brings_and_who_computes_each(
    turning: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plugins", "list", "--ops", "--json"]) == 0
    ops = {op["name"]: op for op in json.loads(capsys.readouterr().out)}
    turn = ops["turn"]
    assert (turn["from"], turn["family"], turn["backends"]) == ("turning", "rope", ["slow"])
    assert turn["axes"] == {"size": "elements of a row"}
    assert turn["tolerances"] == [
        {"dtype": "float32", "relative": 0.5, "absolute": 0.25, "source": "a guess"}
    ]
    assert ops["greedy"]["from"] == "tokenspeed-core"
    assert "slow" in ops["greedy"]["backends"]
    assert main(["plugins", "list", "--ops"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.split() == ["OP", "FAMILY", "FROM", "BACKENDS"]
    assert ["turn", "rope", "turning", "slow"] in [line.split() for line in lines]
    assert len(lines) == len(ops)
    assert "turning" not in sys.modules


def test_an_op_of_nonsense_harms_no_other_and_takes_no_name_of_the_core(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    source = (
        "from tokenspeed_core.api import OpContract\n"
        "ODD = OpContract('odd', None, 3, {1: 2}, 4, 5, ())\n"
        "BAD = OpContract('bad', 'x', '', {}, '', '', ('no tolerance',))\n"
        "TAKEN = OpContract('greedy', 'mine', '', {}, '', '', ())\n"
    )
    for name in ("odd", "bad", "taken"):
        site.install(
            f"{name}-op",
            {f"ops {name}": f"{name}_op:{name.upper()} [api1]"},
            files={f"{name}_op.py": source},
        )
    assert main(["plugins", "list", "--ops", "--json"]) == 0
    ops = {op["name"]: op for op in json.loads(capsys.readouterr().out)}
    assert ops["odd"]["family"] == "None"
    assert "bad" not in ops
    assert ops["greedy"]["from"] == "tokenspeed-core"
    assert main(["plugins", "info", "bad-op"]) == 0
    assert "ops bad  api 1  failed: " in capsys.readouterr().out


def test_info_has_the_contracts_of_the_ops_that_a_distribution_brings(
    turning: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plugins", "info", "turning"]) == 0
    text = capsys.readouterr().out
    assert "    kernels.rope slow  api 1  ok: turn, greedy\n" in text
    for line in (
        "turn (rope)",
        "  called    (x [T, H]) -> y [T, H]",
        "  axis      size: elements of a row",
        "  in place  x",
        "  means     turning.ref:turn",
        "  within    float32: relative 0.5, absolute 0.25; a guess",
    ):
        assert f"\n  {line}" in text
    assert main(["plugins", "info", "turning", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [op["name"] for op in record["ops"]] == ["turn"]
    assert {each["name"]: each["computes"] for each in record["provides"]}["slow"] == [
        "turn",
        "greedy",
    ]


@pytest.mark.parametrize("other", [("--load",), ("--kind", "models")])
def test_what_lists_plugins_does_not_go_with_what_lists_ops(
    refusal: Refusal, other: tuple[str, ...]
) -> None:
    assert (
        refusal("plugins", "list", "--ops", *other)
        == f"--ops lists no plugins; leave out {other[0]}"
    )


def test_info_about_nothing_installed_names_the_nearest(zoo: Site, refusal: Refusal) -> None:
    assert "did you mean sound?" in refusal("plugins", "info", "sounds")
    assert "did you mean tomorrow?" in refusal("plugins", "info", "morrow")


@pytest.fixture
def thirty(site: Site) -> Site:
    """Install thirty plugins, each with a policy and a command, as their authors would: for a range of cores."""
    for number in range(30):
        name = f"stranger_{number}"
        site.install(
            name,
            {
                f"policies p{number}": f"{name}:P [api1]",
                f"commands c{number}": f"{name}:run [api1]",
            },
            requires=core_range(),
            files={f"{name}.py": "P = object()\ndef run(words):\n    return 0\n"},
        )
    return site


def test_with_thirty_plugins_only_what_is_asked_for_is_imported(thirty: Site) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); from tokenspeed_core.cli import main; main(sys.argv[1:]);"
        "print('IMPORTED', *(name for name in sys.modules if name.startswith(('stranger', 'torch', 'numpy'))"
        " or name in ('pydantic', 'rich')))"
    )
    lists = ((("plugins",), ""), (("plugins", "list"), ""), (("plugins", "list", "--json"), ""))
    for words, imported in (
        (("--help",), ""),
        (("--version",), ""),
        *lists,
        (("c7",), " stranger_7"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", code, str(thirty.path), *words],
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.splitlines()[-1] == f"IMPORTED{imported}"
        assert done.stderr == ""


@pytest.mark.tree
def test_every_distribution_of_this_repository_is_known_as_tokenspeeds() -> None:
    folders = [*ROOT.glob("tokenspeed_*/pyproject.toml"), *ROOT.glob("plugins/*/pyproject.toml")]
    assert {path.parent.name.replace("_", "-") for path in folders} <= PUBLISHED


def test_a_malformed_range_of_the_core_is_told_below_the_list(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    site.install("odd", {"policies odd": "odd:POLICY [api1]"}, requires="tokenspeed-core >>> 3")
    assert main(["plugins", "list"]) == 0
    told = "odd policies (odd): it requires 'tokenspeed-core >>> 3', which is no range: it is used with any core"
    assert told in capsys.readouterr().out
    assert main(["plugins", "list", "--json"]) == 0
    (record,) = (
        each for each in json.loads(capsys.readouterr().out) if each["distribution"] == "odd"
    )
    assert record["unread_range"].startswith(
        "it requires 'tokenspeed-core >>> 3', which is no range"
    )
