"""The command line: output, usage errors and imports."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest

from tokenspeed_core import __version__
from tokenspeed_core.cli import main
from tokenspeed_core.commands.settings import Config, SettingsCommand, configure, setting
from tokenspeed_core.errors import ConfigError

HEAVY = ("torch", "numpy", "uvicorn", "transformers", "tokenizers", "huggingface_hub", "rich")


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err.removeprefix("tokenspeed: ").strip()


@pytest.mark.parametrize(
    "arguments",
    [("--help",), ("--version",), ("plugins", "list")],
)
def test_light_commands_import_no_heavy_library(arguments: tuple[str, ...]) -> None:
    code = (
        "import sys; from tokenspeed_core.cli import main; status = main(sys.argv[1:]);"
        f"print('HEAVY', *(name for name in {HEAVY!r} if name in sys.modules)); sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "HEAVY"
    assert len(done.stdout.splitlines()) > 1


@pytest.mark.parametrize("arguments", [("--help",), ("plugins", "list")])
def test_light_commands_take_little_processor_time(arguments: tuple[str, ...]) -> None:
    """The limit is 0.3 s. The fastest of three runs counts, since other programs slow down a shared core."""
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-P", "-m", "tokenspeed_core.cli", *arguments]
        subprocess.run(command, capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
        if times[-1] < 0.3:
            return
    pytest.fail(f"{arguments} took {min(times):.2f} s of processor time")


def test_top_level_help_imports_no_command() -> None:
    code = (
        "import sys; from tokenspeed_core.cli import main; main(['--help']);"
        "print(*(name for name in sys.modules if name.startswith(('tokenspeed_core.config', 'pydantic'))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == ""


def test_version_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"tokenspeed {__version__}\n"


def test_no_arguments_show_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "--version" in capsys.readouterr().out


def test_plugin_command_is_imported_when_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_command(tmp_path, "greeter", "greet", "greeter_module:run [api1]")
    (tmp_path / "greeter_module.py").write_text(
        "def run(words):\n    print('hello', *words)\n    return 5\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["--help"]) == 0
    assert "(greeter 1.0)" in capsys.readouterr().out
    assert "greeter_module" not in sys.modules
    assert main(["greet", "--loud", "world", "--help"]) == 5
    assert capsys.readouterr().out == "hello --loud world --help\n"
    monkeypatch.delitem(sys.modules, "greeter_module")


def test_missing_command_names_its_distribution(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.metadata.distributions", list)
    for command, distribution in (
        ("plugins", "tokenspeed-plugin-tools"),
        ("chat", "tokenspeed-chat"),
        ("serve", "tokenspeed-server"),
    ):
        message = refusal(capsys, command)
        assert message.startswith(f"{command}: ")
        assert f"pip install {distribution}" in message


def write_command(folder: Path, distribution: str, name: str, value: str) -> None:
    info = folder / f"{distribution}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[tokenspeed.commands]\n{name} = {value}\n")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("greet", "m:run [api9]", ("greeter 1.0", "api 9")),
        ("serve", "m:run [api1]", ("greeter 1.0", "reserved")),
    ],
)
def test_unusable_plugin_command_shows_the_reason(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    value: str,
    expected: tuple[str, ...],
) -> None:
    write_command(tmp_path, "greeter", name, value)
    here = list(distributions(path=[str(tmp_path)]))
    monkeypatch.setattr("importlib.metadata.distributions", lambda: here)
    refused = refusal(capsys, name)
    assert all(part in refused for part in expected), refused


@pytest.mark.parametrize("variable", ["TOKENSPEED_NO_PLUGINS=1", "TOKENSPEED_PLUGINS="])
def test_excluded_plugin_provides_no_command(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    variable: str,
) -> None:
    write_command(tmp_path, "greeter", "greet", "greeter_left_out:run [api1]")
    (tmp_path / "greeter_left_out.py").write_text("raise AssertionError('third party code ran')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv(*variable.split("="))
    message = refusal(capsys, "greet")
    assert "greeter 1.0" in message
    assert variable in message


RAISES = """
import sys
from tokenspeed_core import TokenSpeedError

def run(words):
    if words == ["exit"]:
        sys.exit(5)
    if words == ["refuse"]:
        raise TokenSpeedError("no, thank you")
    raise ValueError("one\\ntwo")
"""


def test_failing_command_names_its_plugin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_command(tmp_path, "greeter", "greet", "greeter_raises:run [api1]")
    (tmp_path / "greeter_raises.py").write_text(RAISES)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "greeter_raises:run: ValueError: one two" in refusal(capsys, "greet")
    assert refusal(capsys, "greet", "refuse") == "no, thank you"
    with pytest.raises(SystemExit, match="5"):
        main(["greet", "exit"])
    monkeypatch.delitem(sys.modules, "greeter_raises")


@pytest.mark.parametrize(
    ("source", "line"),
    [
        (RAISES, 'raise ValueError("one\\ntwo")'),
        ("import no_such_library\n", "import no_such_library"),
    ],
)
def test_debug_level_shows_the_traceback(tmp_path: Path, source: str, line: str) -> None:
    site = tmp_path / "site"
    site.mkdir()
    write_command(site, "greeter", "greet", "greeter_raises:run [api1]")
    (site / "greeter_raises.py").write_text(source)

    def log(**variables: str) -> str:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "tokenspeed_core.cli", "greet"],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(site), **variables},
            check=False,
        )
        assert (done.returncode, done.stdout) == (2, "")
        return done.stderr

    (error,) = log().splitlines()
    *traced, last = log(TOKENSPEED_LOG_LEVEL="debug").splitlines()
    assert last == error
    assert "Traceback (most recent call last):" in traced[0] + traced[1]
    assert any("greeter_raises.py" in each for each in traced)
    assert line in map(str.strip, traced)


def test_errors_escape_control_characters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["\x1b]0;title\x07"]) == 2
    assert capsys.readouterr().err.startswith(r"tokenspeed: \x1b]0;title\x07: no such command")


class ReportConfig(Config):
    """The settings of a command of a plugin."""

    report_path: str = setting("report.json", "running", "File for the report.", min_length=1)
    report_key: str | None = setting(None, "running", "Key of the archive.", is_secret=True)


def test_command_declares_its_own_settings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    configs: list[ReportConfig] = []

    def run(*, flags: dict[str, Any]) -> int:
        configs.append(configure(ReportConfig, None, flags, None))
        return 0

    command = SettingsCommand(("tokenspeed report", "Report.", ()), lambda: run, ReportConfig)
    monkeypatch.setenv("TOKENSPEED_REPORT_PATH", "a")
    assert command(["--model", "m"]) == 0
    assert command(["--report-path", "b"]) == 0
    assert [config.report_path for config in configs] == ["a", "b"]
    origins = [config.origin("report_path") for config in configs]
    assert origins == ["TOKENSPEED_REPORT_PATH", "--report-path"]
    engine = configs[0].for_engine()
    assert (engine.model, engine.origin("model")) == ("m", "--model")
    assert not {"report_path", "report_key"} & engine.to_wire()["values"].keys()
    assert command(["--help=running"]) == 0
    assert "--report-path TEXT" in capsys.readouterr().out


def test_misspelled_secret_of_a_command_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENSPEED_REPORT_KEYS", "x")
    with pytest.raises(ConfigError, match="TOKENSPEED_REPORT_KEY"):
        configure(ReportConfig, None, {}, None)
