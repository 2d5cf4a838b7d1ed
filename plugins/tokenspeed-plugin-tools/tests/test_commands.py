"""The group of commands, `plugins list` and `env`: what they print, refuse, and do not import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
from tokenspeed_plugin_tools.command import SUBCOMMANDS
from tokenspeed_plugin_tools.listing import table

from tokenspeed_core.cli import main
from tokenspeed_core.commands import Entry, Status

HEAVY = ("torch", "numpy", "uvicorn", "transformers", "tokenizers", "huggingface_hub", "rich")
Refusal = Callable[..., str]


@pytest.mark.parametrize("words", [("plugins", "list"), ("plugins", "--help"), ("plugins", "list", "--json")])
def test_what_only_informs_imports_no_heavy_library(words: tuple[str, ...]) -> None:
    code = (
        "import sys; from tokenspeed_core.cli import main; status = main(sys.argv[1:]);"
        f"print('HEAVY', *(name for name in {HEAVY!r} if name in sys.modules)); sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "HEAVY"
    assert len(done.stdout.splitlines()) > 1


def test_the_help_names_every_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "--help"]) == 0
    page = capsys.readouterr().out
    assert all(f"\n  {name} " in page for name in SUBCOMMANDS)


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_every_subcommand_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", name, "--help"]) == 0
    assert f"Usage: tokenspeed plugins {name}" in capsys.readouterr().out


def test_a_mistake_is_answered_in_one_line(refusal: Refusal) -> None:
    assert refusal("plugins", "lst") == "plugins lst: no such command; did you mean `tokenspeed plugins list`?"
    assert refusal("plugins", "list", "--jsn") == "--jsn: no such option; `tokenspeed plugins --help` lists them"
    assert refusal("env", "--jsn") == "--jsn: no such option; `tokenspeed env --help` lists them"


def test_without_a_subcommand_plugins_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins"]) == 0
    without = capsys.readouterr().out
    assert main(["plugins", "list"]) == 0
    assert capsys.readouterr().out == without != ""
    assert main(["plugins", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)


def entry(name: str, kind: str = "models", status: Status = Status.OK, reason: str = "") -> Entry:
    name_of = "tokenspeed-models-of-a-stranger"
    return Entry(kind, name, "m:S", 1, name_of, "1.0", "editable /a/long/path/to/it", "", status, reason)


def test_the_table_of_plugins_fits_the_terminal_and_gives_reasons() -> None:
    entries = (
        *(entry(f"Family{i}") for i in range(30)),
        entry("x", "ops", Status.INCOMPATIBLE, "needs api 2 of ops"),
    )
    lines = table(entries, 80).splitlines()
    assert lines[0].split() == ["NAME", "VERSION", "KIND", "API", "PROVIDES", "STATUS"]
    assert all(len(line) <= 80 for line in lines[:-1])
    assert lines[-1] == "tokenspeed-models-of-a-stranger ops (x): needs api 2 of ops"
    wide = table(entries, 1000)
    assert wide.splitlines()[0].split()[-1] == "ORIGIN"
    assert "Family0, Family1," in wide
    assert "/a/long/path/to/it" in wide


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
    hub = {name: value for name, value in os.environ.items() if name.startswith(("HF_HO", "HF_HUB_OFF", "CUDA_V"))}
    assert page["environment"] == {"TOKENSPEED_API_KEY": "***", "TOKENSPEED_PORT": "1234", **hub}
    assert page["libraries"]["pydantic"][0].isdigit()


def test_the_commands_stay_when_the_selection_names_what_is_not_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOKENSPEED_PLUGINS", "absent")
    assert main(["plugins", "--help"]) == 0
    captured = capsys.readouterr()
    assert "TOKENSPEED_PLUGINS names absent, which provides no plugin here" in captured.err
    assert "list" in captured.out


def test_the_shell_completes_them() -> None:
    environ = {**os.environ, "_TOKENSPEED_COMPLETE": "complete_bash", "COMP_WORDS": "tokenspeed pl",
               "COMP_CWORD": "1"}
    code = "import sys; from tokenspeed_core.cli import main; sys.exit(main([]))"
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["plugins"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no full device")
@pytest.mark.parametrize("words", [("list", "--json"), ("freeze",)])
def test_a_full_disk_is_said_in_one_line(words: tuple[str, ...]) -> None:
    command = [sys.executable, "-P", "-m", "tokenspeed_core.cli", "plugins", *words]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode != 0
    assert done.stderr == f"tokenspeed: tokenspeed plugins {words[0]}: No space left on device\n"
