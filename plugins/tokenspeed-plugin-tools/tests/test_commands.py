"""The group of commands, `plugins list` and `env`: what they print, refuse, and do not import."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_site import Site
from tokenspeed_plugin_tools.command import SUBCOMMANDS
from tokenspeed_plugin_tools.listing import table

from tokenspeed_core.cli import main
from tokenspeed_core.commands import Entry, Status

HEAVY = ("torch", "numpy", "uvicorn", "transformers", "tokenizers", "huggingface_hub", "rich")
Refusal = Callable[..., str]


@pytest.mark.parametrize(
    "words", [("plugins", "list"), ("plugins", "--help"), ("plugins", "list", "--json")]
)
def test_what_only_informs_imports_no_heavy_library(words: tuple[str, ...]) -> None:
    code = (
        "import sys; from tokenspeed_core.cli import main; status = main(sys.argv[1:]);"
        f"print('HEAVY', *(name for name in {HEAVY!r} if name in sys.modules)); sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "HEAVY"
    assert len(done.stdout.splitlines()) > 1


def test_the_help_names_every_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "--help"]) == 0
    page = capsys.readouterr().out
    assert all(f"\n  {name} " in page for name in SUBCOMMANDS)


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_every_subcommand_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", name, "--help"]) == 0
    page = capsys.readouterr().out
    assert f"Usage: tokenspeed plugins {name}" in page
    assert "Exit status: 0" in page


def test_the_help_of_what_takes_the_options_of_serve_fits_a_screen_and_tells_of_each_where_it_is_asked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["plugins", "why", "--help"]) == 0
    page = capsys.readouterr().out.splitlines()
    assert len(page) < 50
    assert max(map(len, page)) <= 80
    assert any("--platform NAME" in line for line in page)
    assert any("--kv-cache-dtype" in line for line in page)
    assert main(["plugins", "why", "attention", "--help=dtype"]) == 0
    assert capsys.readouterr().out.startswith("  --dtype auto|float32|bfloat16|float16\n")


def test_a_mistake_is_answered_in_one_line(refusal: Refusal) -> None:
    assert (
        refusal("plugins", "lst")
        == "plugins lst: no such command; did you mean `tokenspeed plugins list`?"
    )
    assert refusal("plugins", "list", "--jsn") == "--jsn: no such option; did you mean --json?"
    assert (
        refusal("plugins", "list", "--x")
        == "--x: no such option; `tokenspeed plugins list --help` lists them"
    )
    assert refusal("env", "--x") == "--x: no such option; `tokenspeed env --help` lists them"
    assert (
        refusal("plugins", "why", "moe", "--platfrm")
        == "--platfrm: no such setting; did you mean --platform?"
    )
    said = "--zzzz: no such setting; `tokenspeed plugins why --help` lists the settings"
    assert refusal("plugins", "why", "moe", "--zzzz") == said


@pytest.mark.parametrize(
    "words",
    [
        "info",
        "why",
        "list extra",
        "list --frob",
        "why attention --frob",
        "why attention --attention-backend.decod x",
    ],
)
def test_a_mistake_in_the_options_is_an_object_for_machines_too(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plugins", *words.split(), "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.err == f"tokenspeed: {json.loads(captured.out)['error']}\n"


@pytest.mark.parametrize(
    "words", ["info tokenspeed-plugin-tools", "doctor --no-plugins", "why attention --layer 0"]
)
def test_on_a_terminal_lines_are_folded_but_for_those_to_type(
    words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, site: Site
) -> None:
    if words.startswith("why"):
        pytest.importorskip("tokenspeed_demo")
    site.install("ahead", {"models Ahead": "ahead:SPEC [api9]"})
    monkeypatch.setenv("COLUMNS", "60")
    main(["plugins", *words.split()])
    piped = capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    main(["plugins", *words.split()])
    folded = capsys.readouterr().out
    assert max(map(len, piped.splitlines())) > 60
    for line in folded.splitlines():
        assert len(line) <= 60 or line.lstrip().startswith("->") or " " not in line.strip()
    timed = re.compile(r"[\d.]+ ms")
    assert timed.sub("", " ".join(folded.split())) == timed.sub("", " ".join(piped.split()))


def test_without_a_subcommand_plugins_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins"]) == 0
    without = capsys.readouterr().out
    assert main(["plugins", "list"]) == 0
    assert capsys.readouterr().out == without != ""
    assert main(["plugins", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)


def entry(name: str, kind: str = "models", status: Status = Status.OK, reason: str = "") -> Entry:
    name_of = "tokenspeed-models-of-a-stranger"
    return Entry(
        kind, name, "m:S", 1, name_of, "1.0", "editable /a/long/path/to/it", "", status, reason
    )


ENTRIES = (
    *(entry(f"Family{i}") for i in range(30)),
    entry("x", "ops", Status.INCOMPATIBLE, "needs api 2 of ops"),
)


@pytest.mark.parametrize("width", [30, 50, 80, 120])
def test_a_terminal_too_narrow_for_the_table_gets_every_word_of_it_folded(width: int) -> None:
    *lines, empty, reason = table(ENTRIES, width).splitlines()
    assert (empty, reason) == ("", "tokenspeed-models-of-a-stranger ops (x): needs api 2 of ops")
    longest_word = max(len(word) for line in lines for word in line.split())
    assert all(len(line) <= max(width, longest_word + width // 2) for line in lines)
    told = " ".join(" ".join(lines).split())
    assert told.startswith(
        "tokenspeed-models-of-a-stranger 1.0 third party, editable /a/long/path/to/it models api 1 ok Family0, "
    )
    assert told.endswith("Family28, Family29 ops api 1 incompatible x")
    if width >= 80:
        assert (
            lines[0]
            == "tokenspeed-models-of-a-stranger 1.0  third party, editable /a/long/path/to/it"
        )
        assert all(len(line) <= width for line in lines)
        assert lines[2].index("Family") == lines[1].index("Family")


def test_a_table_that_fits_has_a_column_for_everything_and_so_has_one_that_is_not_for_a_terminal() -> (
    None
):
    for wide in (table(ENTRIES), table(ENTRIES, 1000)):
        first, second, *_ = wide.splitlines()
        assert first.split() == ["NAME", "VERSION", "KIND", "API", "PROVIDES", "STATUS", "ORIGIN"]
        assert f", {', '.join(f'Family{i}' for i in range(1, 30))}  ok " in second
        assert second.endswith("/a/long/path/to/it")


def test_what_is_piped_is_not_folded_however_narrow_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    assert main(["plugins", "list"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.split()[-1] == "ORIGIN"
    assert all(len(line.split()) >= 6 for line in lines if line.startswith("tokenspeed-"))


def test_plugins_are_listed_for_machines_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "list", "--json"]) == 0
    for each in json.loads(capsys.readouterr().out):
        assert set(each) >= set(Entry.__dataclass_fields__)


def test_the_environment_page_masks_secrets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOKENSPEED_API_KEY", "s3cret")
    monkeypatch.setenv("TOKENSPEED_PORT", "1234")
    assert main(["env", "--json"]) == 0
    page = json.loads(capsys.readouterr().out)
    hub = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("HF_HO", "HF_HUB_OFF", "CUDA_V"))
    }
    assert page["environment"] == {"TOKENSPEED_API_KEY": "***", "TOKENSPEED_PORT": "1234", **hub}
    assert page["libraries"]["pydantic"][0].isdigit()


def test_where_the_selection_names_what_is_not_there_it_is_said_once_and_what_mends_it_works(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["plugins", "freeze"]) == 0
    lock = tmp_path / "plugins.lock"
    lock.write_text(capsys.readouterr().out)
    monkeypatch.setenv("TOKENSPEED_PLUGINS", "absent")
    said = "tokenspeed: TOKENSPEED_PLUGINS names absent, which provides no plugin here; installed: "
    assert main(["--help"]) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith(said)
    assert "\n  plugins " in captured.out
    assert main(["plugins", "--help"]) == 0
    assert "\n  list " in capsys.readouterr().out
    assert main(["plugins", "new", "policy", "acme", "--path", str(tmp_path / "made")]) == 0
    assert main(["plugins", "doctor"]) == 1
    capsys.readouterr()
    asking = (
        ["list"],
        ["list", "--ops"],
        ["info", "tokenspeed-kernels"],
        ["why", "attention"],
        ["check", "tokenspeed-kernels"],
        ["freeze"],
        ["verify", str(lock)],
    )
    for words in (
        *(["plugins", *each] for each in asking),
        ["env"],
        ["serve", "--dry-run"],
        ["nonesuch"],
    ):
        assert main(words) == 2
        err = capsys.readouterr().err
        assert err.startswith(said)
        assert err.count("\n") == 1, "it is said once"


@pytest.mark.parametrize(
    "words",
    [
        ("info", "nobody"),
        ("check", "nobody"),
        ("new", "nothing", "acme"),
        ("verify", "nowhere.lock"),
        ("why", "nothing"),
        ("why", "attention", "--platform", "h100"),
        ("why", "attention", "/nowhere"),
        ("list", "--kind", "nothing"),
        ("lst",),
    ],
)
def test_what_is_refused_is_told_to_machines_as_json_too(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plugins", *words]) == 2
    plain = capsys.readouterr()
    assert plain.out == ""
    assert main(["plugins", *words, "--json"]) == 2
    told = capsys.readouterr()
    assert told.err == plain.err
    assert f"tokenspeed: {json.loads(told.out)['error']}\n" == told.err


def test_of_several_commands_of_a_distribution_the_help_says_of_each_what_it_is(
    site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    info = site.install(
        "acme", {"commands sing": "acme:sing [api1]", "commands dance": "acme:dance [api1]"}
    )
    head = "Metadata-Version: 2.1\nName: acme\nVersion: 1.0\nSummary: "
    (info / "METADATA").write_text(f"{head}sing: Sing a song. dance: Dance on a table.\n")
    assert main(["--help"]) == 0
    page = capsys.readouterr().out
    assert re.search(r"^  sing +Sing a song\.$", page, re.MULTILINE)
    assert re.search(r"^  dance +Dance on a table\.$", page, re.MULTILINE)
    (info / "METADATA").write_text(f"{head}What parties need.\n")
    assert main(["--help"]) == 0
    page = capsys.readouterr().out
    assert len(re.findall(r"^  (?:sing|dance) +What parties need\.$", page, re.MULTILINE)) == 2


def test_the_shell_completes_them() -> None:
    environ = {
        **os.environ,
        "_TOKENSPEED_COMPLETE": "complete_bash",
        "COMP_WORDS": "tokenspeed pl",
        "COMP_CWORD": "1",
    }
    code = "import sys; from tokenspeed_core.cli import main; sys.exit(main([]))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["plugins"]


@pytest.mark.parametrize(
    "words", [("plugins", "list"), ("plugins", "list", "--json"), ("plugins", "freeze"), ("env",)]
)
def test_a_pipe_that_nobody_reads_is_no_finding(words: tuple[str, ...]) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-P", "-u", "-m", "tokenspeed_core.cli", *words]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no full device")
@pytest.mark.parametrize("words", [("list", "--json"), ("freeze",)])
def test_a_full_disk_is_said_in_one_line(words: tuple[str, ...]) -> None:
    command = [sys.executable, "-P", "-m", "tokenspeed_core.cli", "plugins", *words]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode != 0
    assert done.stderr == f"tokenspeed: tokenspeed plugins {words[0]}: No space left on device\n"


@pytest.mark.parametrize(
    "text", ["", "def\n"], ids=["another package of its name", "a damaged file"]
)
def test_where_the_tools_themselves_are_broken_one_line_says_so_and_what_mends_it(
    tmp_path: Path, text: str
) -> None:
    package = tmp_path / "tokenspeed_plugin_tools"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "command.py").write_text(text)
    if text:  # installed here, and first on the path
        info = tmp_path / "tokenspeed_plugin_tools-9.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: tokenspeed-plugin-tools\nVersion: 9.0\n"
        )
        entry = "plugins = tokenspeed_plugin_tools.command:plugins [api1]"
        (info / "entry_points.txt").write_text(f"[tokenspeed.commands]\n{entry}\n")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    doctor = [sys.executable, "-m", "tokenspeed_core.cli", "plugins", "doctor"]
    done = subprocess.run(doctor, capture_output=True, text=True, env=environ, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert (
        f"({package / 'command.py'}, line 1)" if text else f"would come from {package},"
    ) in done.stderr
    assert "`pip install --force-reinstall --no-deps tokenspeed-plugin-tools==" in done.stderr
