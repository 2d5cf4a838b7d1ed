"""`plugins doctor`: each way an installation can be broken, the line that mends it, and that nothing breaks doctor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_site import Site
from tokenspeed_plugin_tools.probe import probe

from tokenspeed_core.cli import main

POLICY = "POLICY = object\n"
KERNELS = {"vendor": "SPEC", "lost": "LOST"}


@pytest.fixture(autouse=True)
def _imports_only_what_the_test_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the plugins of this environment unimported, of which each distribution's take a process."""
    monkeypatch.setattr(
        "tokenspeed_plugin_tools.doctor.probe",
        lambda entries: probe(
            [entry for entry in entries if not entry.distribution.startswith("tokenspeed-")]
        ),
    )


def diagnose(
    capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[int, dict[str, list[dict[str, Any]]]]:
    """Return the exit status, and the findings by distribution."""
    status = main(["plugins", "doctor", *words, "--json"])
    found: dict[str, list[dict[str, Any]]] = {}
    for each in json.loads(capsys.readouterr().out)["findings"]:
        found.setdefault(each["distribution"], []).append(each)
    return status, found


def test_what_is_sound_is_called_so(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.install("sound", {"policies calm": "sound:POLICY [api1]"}, files={"sound.py": POLICY})
    _, found = diagnose(capsys)
    assert "sound" not in found
    status = main(["plugins", "doctor"])
    text = capsys.readouterr().out
    assert text.partition("\n")[0].startswith("no problems") == (status == 0)


@pytest.mark.parametrize(
    ("source", "what", "mend"),
    [
        (
            "raise OSError('no disk')\n",
            "OSError: no disk",
            "pip install --force-reinstall odd==1.0",
        ),
        (
            "OK = 1\ndef\n",
            "site/odd.py, line 2)",
            "pip install 'odd!=1.0' for another version, or tell its authors",
        ),
        (
            "import no_such_library\n",
            "No module named 'no_such_library'",
            "install what provides 'no_such_library'",
        ),
        (
            "import odd.part\n",
            "No module named 'odd.part'",
            "pip install --force-reinstall odd==1.0",
        ),
        ("OTHER = 1\n", "AttributeError", "pip install --force-reinstall odd==1.0"),
        ("raise SystemExit(4)\n", "SystemExit: 4", "pip install --force-reinstall odd==1.0"),
        (
            "import os\nos.abort()\n",
            "its import ended the process with status -6",
            "TOKENSPEED_PLUGINS=-odd",
        ),
    ],
)
def test_an_import_that_fails_is_found(
    site: Site, capsys: pytest.CaptureFixture[str], source: str, what: str, mend: str
) -> None:
    site.install("odd", {"policies odd": "odd:POLICY [api1]"}, files={"odd.py": source})
    status, found = diagnose(capsys)
    (finding,) = found["odd"]
    assert status == 1
    assert what in finding["what"]
    assert mend in finding["mend"]
    assert "TOKENSPEED_PLUGINS=-odd goes without it" in finding["mend"]


def test_what_fails_and_came_from_a_folder_is_mended_there(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    source = site.path.parent / "source"
    source.mkdir()
    info = site.install("odd", {"policies odd": "odd:POLICY [api1]"}, files={"odd.py": "def\n"})
    (info / "direct_url.json").write_text(json.dumps({"url": source.as_uri(), "dir_info": {}}))
    (finding,) = diagnose(capsys)[1]["odd"]
    assert finding["mend"].startswith(
        f"mend what is in {source}, then pip install --force-reinstall {source}; "
    )


@pytest.mark.parametrize(
    ("value", "requires", "what", "mend"),
    [
        ("odd:P [api2]", "", "needs api 2 of policies", "pip install --upgrade tokenspeed-core"),
        ("odd:P [api0]", "", "needs api 0 of policies", "pip install --upgrade odd"),
        ("odd:P", "", "names no api", "tell its author"),
        (
            "odd:P [api1]",
            "tokenspeed-core>=99",
            "needs tokenspeed-core >=99",
            "pip install --upgrade tokenspeed-core",
        ),
        (
            "odd:P [api1]",
            "tokenspeed-core==99.*",
            "needs tokenspeed-core ==99.*",
            "--upgrade tokenspeed-core",
        ),
        (
            "odd:P [api1]",
            "tokenspeed-core>0.1.0,<0.2",
            "needs tokenspeed-core <0.2,>0.1",
            "--upgrade tokenspeed-core",
        ),
        (
            "odd:P [api1]",
            "tokenspeed-core~=0.0.3",
            "needs tokenspeed-core ~=0.0.3",
            "pip install --upgrade odd, or",
        ),
        (
            "odd:P [api1]",
            "tokenspeed-core<0.1",
            "needs tokenspeed-core <0.1",
            "pip install --upgrade odd, or",
        ),
        (
            "odd:POLICY [api1]",
            "no-such-thing>=2",
            "it requires no-such-thing>=2, which is not installed",
            "pip install 'no-such-thing>=2'",
        ),
        (
            "odd:POLICY [api1]",
            "typer<0.0.1",
            "it requires typer<0.0.1, which is",
            "pip install 'typer<0.0.1'",
        ),
    ],
)
def test_what_does_not_fit_is_found(
    site: Site, capsys: pytest.CaptureFixture[str], value: str, requires: str, what: str, mend: str
) -> None:
    site.install("odd", {"policies odd": value}, requires=requires, files={"odd.py": POLICY})
    status, found = diagnose(capsys)
    (finding,) = found["odd"]
    assert status == 1
    assert what in finding["what"]
    assert mend in finding["mend"]


def test_a_group_of_entry_points_without_its_end_is_found(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    info = site.install("torn", {"policies torn": "torn:POLICY [api1]"}, files={"torn.py": POLICY})
    (info / "entry_points.txt").write_text("[tokenspeed.policies\ntorn = torn:POLICY [api1]\n")
    (finding,) = diagnose(capsys)[1]["torn"]
    assert "entry_points.txt has a group without its end: [tokenspeed.policies" in finding["what"]
    assert finding["mend"] == f"rm -r {info}, then install it again"


def test_a_value_that_names_no_object_is_found_with_its_line(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    info = site.install("odd", {"policies odd": "a b c"})
    (finding,) = diagnose(capsys)[1]["odd"]
    assert finding["what"] == (
        f"its metadata in {info} cannot be read: ValueError: entry_points.txt has a value of another form: odd = a b c"
    )


def test_entry_points_that_are_not_utf8_of_whatever_package_keep_no_command_from_saying_whose_they_are(
    site: Site,
) -> None:
    info = site.path / "foreign-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: foreign\nVersion: 1.0\n")
    (info / "entry_points.txt").write_bytes(
        "[console_scripts]\ncafé = foreign:main\n".encode("latin-1")
    )

    environment = {
        name: text for name, text in os.environ.items() if name != "PYDANTIC_DISABLE_PLUGINS"
    }

    def said(*words: str) -> tuple[int, str, str]:
        done = subprocess.run(
            [sys.executable, "-m", "tokenspeed_core.cli", *words],
            capture_output=True,
            text=True,
            env={**environment, "PYTHONPATH": str(site.path)},
            cwd=site.path.parent,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    told = f"{info} cannot be read: what plugins it has are left out; `tokenspeed plugins doctor`\n"
    for words in (["--version"], ["--help"], ["plugins", "list", "--no-plugins"]):
        assert (said(*words)[0], said(*words)[2]) == (0, told)
    status, found, _ = said("plugins", "doctor", "--no-plugins")
    assert status == 1
    assert f"foreign\n  its metadata in {info} cannot be read: UnicodeDecodeError: " in found
    assert f"  -> rm -r {info}, then install it again\n" in found


def test_compiled_code_of_another_python_is_found(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    info = site.install(
        "native", {"policies calm": "native:POLICY [api1]"}, files={"native.py": POLICY}
    )
    (info / "WHEEL").write_text("Root-Is-Purelib: false\nTag: cp27-cp27m-win32\n")
    (finding,) = diagnose(capsys)[1]["native"]
    assert finding["what"].startswith("native was built for cp27-cp27m-win32, and this is ")
    assert finding["mend"] == "pip install --force-reinstall native==1.0"


def test_two_with_one_name_are_found_until_the_selection_settles_it(
    site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("first", "second"):
        site.install(name, {"policies same": f"{name}:POLICY [api1]"}, files={f"{name}.py": POLICY})
    status, found = diagnose(capsys)
    assert status == 1
    assert "policies same is claimed by first 1.0 and second 1.0" in found["second"][0]["what"]
    assert "TOKENSPEED_PLUGINS=-second" in found["second"][0]["mend"]
    monkeypatch.setenv("TOKENSPEED_PLUGINS", "-second")
    _, found = diagnose(capsys)
    assert not {"first", "second"} & found.keys()


def test_a_shadowing_of_a_built_in_name_is_found(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    site.install(
        "rude",
        {"policies fcfs": "rude:P [api1]", "commands serve": "rude:P [api1]"},
        files={"rude.py": "P = 1\n"},
    )
    status, found = diagnose(capsys)
    assert status == 1
    assert sorted(each["what"] for each in found["rude"]) == [
        "commands serve: the name serve is built in; its author must choose another",
        "policies fcfs: the name fcfs is built in; its author must choose another",
    ]


def test_metadata_without_code_is_found_with_the_folder_to_remove(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    stale = site.path / "stale_thing.egg-info"
    stale.mkdir()
    (stale / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: stale-thing\nVersion: 0.9\n")
    (stale / "entry_points.txt").write_text(
        "[tokenspeed.policies]\nstale = stale_thing.gone:P [api1]\n"
    )
    site.install("gone", {"policies gone": "gone_module:P [api1]"})
    status, found = diagnose(capsys)
    assert status == 1
    (finding,) = found["stale-thing"]
    assert "the module stale_thing is gone" in finding["what"]
    assert finding["mend"] == f"rm -r {stale}"
    assert found["gone"][0]["mend"] == "pip uninstall -y gone"


def test_an_editable_install_whose_folder_is_gone_is_found(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    info = site.install("moved", {"policies moved": "moved_module:P [api1]"})
    (info / "direct_url.json").write_text(
        '{"url": "file:///home/me/mo%20ved", "dir_info": {"editable": true}}'
    )
    status, found = diagnose(capsys)
    (finding,) = found["moved"]
    assert status == 1
    assert (
        "it was installed from /home/me/mo ved, and the module moved_module is not there"
        in finding["what"]
    )
    assert (
        finding["mend"]
        == "pip uninstall -y moved, or put it back and pip install -e '/home/me/mo ved'"
    )


PROJECT = """[project]
name = "mine"
version = "1.0"
"""
GROUP = '[project.entry-points."tokenspeed.policies"]\n'


def editable(site: Site, entries: dict[str, str], pyproject: str | None) -> None:
    """Install the project in the site's folder as pip does with -e, and write what its pyproject.toml says by now."""
    if pyproject is not None:
        (site.path / "pyproject.toml").write_bytes(pyproject.encode(errors="surrogateescape"))
    info = site.install("mine", entries, files={"mine.py": POLICY})
    (info / "direct_url.json").write_text(
        json.dumps({"url": site.path.as_uri(), "dir_info": {"editable": True}})
    )


@pytest.mark.parametrize(
    ("installed", "written", "what"),
    [
        ({}, f'{GROUP}new = "mine:POLICY [api1]"', "policies new is not installed"),
        ({"policies old": "mine:POLICY [api1]"}, "", "policies old is not there any more"),
        (
            {"policies a": "mine:OTHER [api1]"},
            f'{GROUP}a = "mine:POLICY [api1]"',
            "policies a is changed",
        ),
        (
            {"policies old": "mine:POLICY [api1]"},
            f'{GROUP}new = "mine:POLICY [api1]"\nnewer = "mine:POLICY [api1]"',
            "policies new, policies newer are not installed; policies old is not there any more",
        ),
    ],
    ids=["the first plugin", "the last plugin", "another object", "renamed"],
)
def test_an_editable_install_older_than_its_project_is_found_with_the_line_that_renews_it(
    site: Site,
    capsys: pytest.CaptureFixture[str],
    installed: dict[str, str],
    written: str,
    what: str,
) -> None:
    editable(site, installed, PROJECT + written)
    status, found = diagnose(capsys)
    assert status == 1
    (finding,) = [each for each in found["mine"] if "older than" in each["what"]]
    assert finding["what"] == f"its installation is older than {site.path}/pyproject.toml: {what}"
    assert finding["mend"] == f"pip install -e {site.path}"


@pytest.mark.parametrize(
    "written",
    [
        PROJECT + f'{GROUP}calm = "mine:POLICY  [api1]"',
        f'{PROJECT}dynamic = ["entry-points"]',
        "[tool.other]\nplugins = 1",
        None,
    ],
    ids=["current", "left to the build tool", "another tool's project", "no such file"],
)
def test_an_editable_install_that_its_project_does_not_contradict_is_sound(
    site: Site, capsys: pytest.CaptureFixture[str], written: str | None
) -> None:
    editable(site, {"policies calm": "mine:POLICY [api1]"}, written)
    assert "mine" not in diagnose(capsys)[1]


@pytest.mark.parametrize(
    "written", ["[project", "project = 3", '[project]\nentry-points = ["a"]', "\udcff"]
)
def test_a_project_that_cannot_be_read_is_noted_and_keeps_doctor_from_nothing(
    site: Site, capsys: pytest.CaptureFixture[str], written: str
) -> None:
    editable(site, {"policies calm": "mine:POLICY [api1]"}, written)
    site.install("gone", {"policies gone": "gone_module:P [api1]"})
    _, found = diagnose(capsys)
    (finding,) = found["mine"]
    assert finding["is_note"]
    assert finding["what"].startswith(
        f"whether it is installed as {site.path}/pyproject.toml has it is unknown: "
    )
    assert finding["mend"] == f"mend that file, then pip install -e {site.path}"
    assert "gone" in found


def test_an_egg_info_beside_its_code_is_compared_with_the_project_too(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    egg = site.path / "mine.egg-info"
    egg.mkdir()
    (egg / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (egg / "entry_points.txt").write_text("[tokenspeed.policies]\nold = mine:POLICY [api1]\n")
    (site.path / "mine.py").write_text(POLICY)
    (site.path / "pyproject.toml").write_text(f'{PROJECT}{GROUP}new = "mine:POLICY [api1]"')
    (finding,) = diagnose(capsys)[1]["mine"]
    assert finding["what"].endswith(
        "policies new is not installed; policies old is not there any more"
    )
    assert finding["mend"] == f"pip install -e {site.path}"


def test_a_second_copy_is_found(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.install(
        "twice",
        {"policies twice": "twice:POLICY [api1]"},
        version="1.0",
        files={"twice.py": POLICY},
    )
    site.install("twice", {"policies twice": "twice:POLICY [api1]"}, version="2.0")
    status, found = diagnose(capsys)
    assert status == 1
    assert "installed twice" in found["twice"][0]["what"]
    assert "then pip install twice" in found["twice"][0]["mend"]


@pytest.mark.parametrize("is_first", [False, True])
def test_what_a_build_left_in_an_editable_installs_folder_is_told_with_the_folder_to_remove(
    site: Site,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    is_first: bool,
) -> None:
    source = tmp_path / "mine" / "src"
    egg = source / "mine.egg-info"
    egg.mkdir(parents=True)
    (egg / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (egg / "entry_points.txt").write_text("[tokenspeed.policies]\ncalm = mine:POLICY [api1]\n")
    (source / "mine.py").write_text(POLICY)
    info = site.install("mine", {"policies calm": "mine:POLICY [api1]"})
    record = {"url": source.parent.as_uri(), "dir_info": {"editable": True}}
    (info / "direct_url.json").write_text(json.dumps(record))
    monkeypatch.syspath_prepend(str(source))
    if not is_first:
        sys.path.append(sys.path.pop(0))
    (finding,) = diagnose(capsys)[1]["mine"]
    side = "ahead of" if is_first else "behind"
    assert (
        finding["what"]
        == f"a build left {egg} on the path, {side} the editable install of {source.parent}"
    )
    assert finding["mend"] == f"rm -r {egg}"
    assert finding["is_note"] == (not is_first)


def test_a_missing_vendor_library_is_a_note_with_the_line_that_brings_it(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    source = (
        "from tokenspeed_core.api import Capability, KernelSpec\n"
        "SPEC = KernelSpec(op='attention', backend='vendor', capability=Capability(('cuda',), ('bfloat16',)),\n"
        "                  load='vendor_plugin:make', requires=('no_such_library',), obtain='pip install it')\n"
        "LOST = KernelSpec(op='attention', backend='lost', capability=Capability(('cuda',), ('bfloat16',)),\n"
        "                  load='vendor_plugin_gone:make')\n"
    )
    site.install(
        "vendor-plugin",
        {
            f"kernels.attention {name}": f"vendor_plugin:{spec} [api1]"
            for name, spec in KERNELS.items()
        },
        files={"vendor_plugin.py": source},
    )
    _, found = diagnose(capsys)
    lost, missing = sorted(found["vendor-plugin"], key=lambda each: each["is_note"])
    assert "names vendor_plugin_gone:make, whose module does not exist" in lost["what"]
    assert missing["is_note"]
    assert "needs the module no_such_library" in missing["what"]
    assert missing["mend"] == "pip install it"


def test_a_descriptor_that_imports_a_tensor_library_is_noted(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    site.install(
        "slow",
        {"policies slow": "slow:POLICY [api1]"},
        files={"slow.py": f"import torch\n{POLICY}", "torch.py": "tensor = 1\n"},
    )
    _, found = diagnose(capsys)
    (finding,) = found["slow"]
    assert finding["is_note"]
    assert "imports torch with its descriptor" in finding["what"]


def test_everything_broken_at_once_and_switched_off_is_still_looked_at(
    site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    site.install(
        "raises",
        {"policies angry": "raises:P [api1]"},
        files={"raises.py": "raise OSError('no disk')\n"},
    )
    site.install(
        "tomorrow", {"policies new": "tomorrow:P [api2]"}, files={"tomorrow.py": "P = 1\n"}
    )
    site.install("gone", {"policies gone": "gone_module:P [api1]"})
    everything = {"raises", "tomorrow", "gone"}
    assert everything <= diagnose(capsys)[1].keys()
    monkeypatch.setenv("TOKENSPEED_PLUGINS", "-raises:policies:angry")
    assert everything - {"raises"} == everything & diagnose(capsys)[1].keys()
    assert main(["plugins", "list", "--json"]) == 0
    status = {each["distribution"]: each["status"] for each in json.loads(capsys.readouterr().out)}
    assert [status[name] for name in ("raises", "tomorrow", "gone")] == [
        "disabled",
        "incompatible",
        "ok",
    ]
    monkeypatch.setenv("TOKENSPEED_PLUGINS", "")
    assert everything - {"raises"} <= diagnose(capsys)[1].keys()
    assert "raises" not in diagnose(capsys, "--no-plugins")[1]
    monkeypatch.setenv("TOKENSPEED_PLUGINS", "absent")
    status, found = diagnose(capsys)
    assert status == 1
    assert found["TOKENSPEED_PLUGINS"][0]["mend"] == "correct the variable, or unset it"
    assert not {"raises", "tomorrow"} & set(sys.modules)


def test_each_problem_stands_with_its_mend_below_its_distribution(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    site.install("gone", {"policies gone": "gone_module:P [api1]"})
    assert main(["plugins", "doctor"]) == 1
    text = capsys.readouterr().out
    assert (
        f"gone 1.0\n  only its metadata is left in {site.path}: the module gone_module is gone\n"
        in text
    )
    assert "  -> pip uninstall -y gone" in text
