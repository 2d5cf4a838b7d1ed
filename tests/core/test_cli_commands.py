"""The command line: what it prints, what it refuses, and what it does not import."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from tokenspeed_core import __version__
from tokenspeed_core.cli import main
from tokenspeed_core.config import Config
from tokenspeed_core.config.schema import SECTIONS, flag
from tokenspeed_core.errors import CheckpointError

HEAVY = ("torch", "numpy", "uvicorn", "transformers", "tokenizers", "huggingface_hub", "rich")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """Stand in for the server: note the configuration that it is run with."""
    configs: list[Config] = []
    module = types.ModuleType("tokenspeed_server.serve")

    def run(config: Config) -> int:
        configs.append(config)
        return 7

    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tokenspeed_server.serve", module)
    return configs


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err.removeprefix("tokenspeed: ").strip()


@pytest.mark.parametrize(
    "arguments",
    [("--help",), ("--version",), ("serve", "--help"), ("serve", "--help=backends")],
)
def test_what_only_informs_imports_no_heavy_library(arguments: tuple[str, ...]) -> None:
    code = (
        "import sys; from tokenspeed_core.cli import main; status = main(sys.argv[1:]);"
        f"print('HEAVY', *(name for name in {HEAVY!r} if name in sys.modules)); sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "HEAVY"
    assert len(done.stdout.splitlines()) > 1


def test_the_top_level_help_imports_no_command() -> None:
    code = (
        "import sys; from tokenspeed_core.cli import main; main(['--help']);"
        "print(*(name for name in sys.modules if name.startswith(('tokenspeed_core.config', 'pydantic'))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == ""
    assert "  serve " in done.stdout


def test_help_shows_sections_and_every_setting_in_one_of_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["serve", "--help"]) == 0
    overview = capsys.readouterr().out
    shown = set()
    for section in SECTIONS:
        assert f"\n  {section} " in overview
        assert main(["serve", f"--help={section}"]) == 0
        shown |= {
            word.strip(",") for word in capsys.readouterr().out.split() if word.startswith("--")
        }
    for name in Config.model_fields:
        assert flag(name) in shown
        assert flag(name) in overview


def test_help_is_folded_to_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for words in ("--help", "--help=all"):
        assert main(["serve", words]) == 0
        assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_help_about_a_flag_shows_its_bounds_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help=--port"]) == 0
    out = capsys.readouterr().out
    assert "--port 0..65535" in out
    assert "default: 8000" in out
    assert "--host" not in out


def test_help_about_nothing_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean --help=backends?" in refusal(capsys, "serve", "--help=bakends")


def test_serve_runs_the_server_with_what_was_typed(served: list[Config]) -> None:
    status = main(
        [
            "serve",
            "some/model",
            "--port=1",
            "--no-enable-prefix-caching",
            "--enforce-eager",
            "--attention-backend",
            "a,b",
            "--attention-backend.decode=c",
            "--chunked-prefill-size",
            "-1",
        ]
    )
    assert status == 7
    (config,) = served
    assert config.model == "some/model"
    assert config.port == 1
    assert config.enable_prefix_caching is False
    assert config.enforce_eager is True
    assert config.attention_backend == {"default": ("a", "b"), "decode": ("c",)}
    assert config.chunked_prefill_size == -1
    assert config.max_num_seqs == Config().max_num_seqs
    assert config.origin("max_num_seqs") == "default"


def test_the_positional_model_and_the_flag_are_the_same(
    served: list[Config], capsys: pytest.CaptureFixture[str]
) -> None:
    main(["serve", "a"])
    main(["serve", "--model", "a"])
    assert [config.model for config in served] == ["a", "a"]
    assert "given twice" in refusal(capsys, "serve", "a", "--model", "b")


def test_every_setting_reaches_the_configuration_from_its_flag(served: list[Config]) -> None:
    values = {
        "hf_overrides": '{"a": 1}',
        "dtype": "float32",
        "log_level": "debug",
        "log_level_http": "debug",
        "schedule_policy": "priority",
        "gpu_memory_utilization": "0.5",
        "cudagraph_capture_sizes": "1,2",
        "kv_cache_memory": "1GB",
        "max_cudagraph_capture_size": "3",
        "kv_cache_dtype": "fp8_e4m3",
        "kernel_backend": "greedy=a",
        "backend_option": "a.b=c",
    }
    beside = {"quantization_param_path": ["--kv-cache-dtype", "fp8_e4m3"]}
    for name, field in Config.model_fields.items():
        if field.annotation is bool:
            off = field.default is True
            words = [f"--no-{flag(name)[2:]}" if off else flag(name)]
        else:
            words = [flag(name), values.get(name, "3"), *beside.get(name, [])]
        main(["serve", *words])
        config = served.pop()
        assert config.origin(name) == flag(name)
        assert getattr(config, name) != field.default, name


def test_a_dry_run_explains_and_does_not_serve(
    served: list[Config], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = types.ModuleType("tokenspeed_core.engine.factory")
    module.dry_run = lambda config: f"block_size {config.block_size}"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tokenspeed_core.engine.factory", module)
    assert main(["serve", "--dry-run", "--block-size", "16"]) == 0
    assert capsys.readouterr().out == "block_size 16\n"
    assert served == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("serv",), "serv: no such command; did you mean `tokenspeed serve`?"),
        (("serve", "--prt", "1"), "--prt: no such setting; did you mean --port?"),
        (("serve", "--prt=1"), "--prt: no such setting; did you mean --port?"),
        (
            ("serve", "--page-size=16"),
            "--page-size: that is another engine's name; here it is --block-size",
        ),
        (("serve", "--port", "x"), "--port x: must be a whole number"),
        (("serve", "--port"), "option '--port' requires an argument"),
        (("serve", "--max-num-batched-tokens", "1"), "--chunked-prefill-size"),
    ],
)
def test_a_mistake_is_answered_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], expected: str
) -> None:
    assert expected in refusal(capsys, *arguments)


def test_what_the_server_refuses_is_one_line_and_a_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(config: Config) -> int:
        raise CheckpointError("/nowhere: no config.json")

    module = types.ModuleType("tokenspeed_server.serve")
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tokenspeed_server.serve", module)
    assert refusal(capsys, "serve", "/nowhere") == "/nowhere: no config.json"


def test_the_version_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"tokenspeed {__version__}\n"


def test_without_words_it_helps(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "serve" in capsys.readouterr().out


def test_a_plugins_command_is_listed_from_metadata_and_imported_when_it_is_run(
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


def test_a_command_of_ours_that_is_not_installed_is_named_with_the_distribution_that_brings_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.metadata.distributions", list)
    for command, distribution in (
        ("plugins", "tokenspeed-plugin-tools"),
        ("chat", "tokenspeed-chat"),
    ):
        expected = f"{command}: comes with {distribution}, which is not installed; pip install {distribution}"
        assert refusal(capsys, command) == expected


def write_command(folder: Path, distribution: str, name: str, value: str) -> None:
    info = folder / f"{distribution}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[tokenspeed.commands]\n{name} = {value}\n")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        (
            "greet",
            "m:run [api9]",
            "commands greet of greeter 1.0 is incompatible: needs api 9 of commands",
        ),
        ("serve", "m:run [api1]", None),
    ],
)
def test_a_plugins_command_that_may_not_be_used_says_why_and_one_of_ours_is_not_shadowed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    served: list[Config],
    name: str,
    value: str,
    expected: str | None,
) -> None:
    write_command(tmp_path, "greeter", name, value)
    monkeypatch.syspath_prepend(str(tmp_path))
    if expected is None:
        assert main([name]) == 7
        assert len(served) == 1
    else:
        assert expected in refusal(capsys, name)


@pytest.mark.parametrize("variable", ["TOKENSPEED_NO_PLUGINS=1", "TOKENSPEED_PLUGINS="])
def test_a_variable_that_leaves_out_a_plugin_leaves_out_its_command(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    variable: str,
) -> None:
    write_command(tmp_path, "greeter", "greet", "greeter_left_out:run [api1]")
    (tmp_path / "greeter_left_out.py").write_text("raise AssertionError('third party code ran')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv(*variable.split("="))
    assert (
        refusal(capsys, "greet")
        == f"commands greet of greeter 1.0 is disabled: left out by {variable}"
    )


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


def test_a_command_that_raises_ends_in_one_line_that_names_whose_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_command(tmp_path, "greeter", "greet", "greeter_raises:run [api1]")
    (tmp_path / "greeter_raises.py").write_text(RAISES)
    monkeypatch.syspath_prepend(str(tmp_path))
    whose = "commands greet of greeter 1.0: greeter_raises:run fails: ValueError: one two; `pip uninstall greeter` or "
    assert refusal(capsys, "greet").startswith(whose)
    assert refusal(capsys, "greet").endswith("; TOKENSPEED_LOG_LEVEL=debug shows its traceback")
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
def test_the_traceback_of_a_command_is_shown_where_the_level_of_the_log_is_debug(
    tmp_path: Path, source: str, line: str
) -> None:
    site = tmp_path / "site"
    site.mkdir()
    write_command(site, "greeter", "greet", "greeter_raises:run [api1]")
    (site / "greeter_raises.py").write_text(source)

    def said(**variables: str) -> str:
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

    (told,) = said().splitlines()
    *traced, last = said(TOKENSPEED_LOG_LEVEL="debug").splitlines()
    assert last == told
    assert "Traceback (most recent call last):" in traced[0] + traced[1]
    assert any("greeter_raises.py" in each for each in traced)
    assert line in map(str.strip, traced)


def test_serve_shows_the_traceback_behind_its_refusal_where_its_own_flag_says_debug(
    tmp_path: Path,
) -> None:
    def said(*flags: str) -> list[str]:
        words = [
            sys.executable,
            "-P",
            "-m",
            "tokenspeed_core.cli",
            "serve",
            str(tmp_path / "missing"),
            *flags,
        ]
        done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, check=False)
        assert (done.returncode, done.stdout) == (2, "")
        return done.stderr.splitlines()

    (told,) = said()
    *traced, last = said("--log-level", "debug")
    assert last == told
    assert "Traceback (most recent call last):" in traced


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("tokenspeed ser", "serve"),
        ("tokenspeed serve --max-n", "--max-num-seqs"),
        ("tokenspeed serve --attention-backend.d", "--attention-backend.decode"),
    ],
)
def test_the_shell_completes_commands_and_flags(typed: str, expected: str) -> None:
    environ = {
        **os.environ,
        "_TOKENSPEED_COMPLETE": "complete_bash",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(typed.count(" ")),
    }
    code = "import sys; from tokenspeed_core.cli import main; sys.exit(main([]))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == [expected]


def test_an_error_that_quotes_what_was_typed_or_installed_cannot_steer_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["\x1b]0;title\x07"]) == 2
    assert capsys.readouterr().err.startswith(r"tokenspeed: \x1b]0;title\x07: no such command")
