"""The command `tokenspeed serve`: its help, its flags, and its errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenspeed_server import dry_run
from tokenspeed_server import serve as server
from tokenspeed_server.settings import ServerConfig

from tokenspeed_core.cli import main
from tokenspeed_core.config.settings import flag
from tokenspeed_core.errors import CheckpointError, ConfigError

pytestmark = pytest.mark.slow

HEAVY = ("torch", "numpy", "uvicorn", "fastapi", "transformers", "tokenizers", "huggingface_hub")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServerConfig]:
    """Replace the server by one that records its configuration."""
    configs: list[ServerConfig] = []

    def run(config: ServerConfig) -> int:
        configs.append(config)
        return 7

    monkeypatch.setattr(server, "run", run)
    return configs


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `tokenspeed` in a separate process."""
    command = [sys.executable, "-P", "-m", "tokenspeed_core.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the one line with which a command line is refused."""
    assert main(["serve", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err.removeprefix("tokenspeed: ").strip()


@pytest.mark.parametrize("topic", ["--help", "--help=backends"])
def test_help_imports_no_heavy_library(topic: str) -> None:
    code = (
        "import sys; from tokenspeed_core.cli import main; main(sys.argv[1:]);"
        f"print('HEAVY', *(name for name in {HEAVY!r} if name in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "serve", topic], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "HEAVY"


def test_help_lists_every_setting_in_a_section(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["serve", "--help"]) == 0
    overview = capsys.readouterr().out
    shown = set()
    for section in ServerConfig.sections:
        assert f"\n  {section} " in overview
        assert main(["serve", f"--help={section}"]) == 0
        page = capsys.readouterr().out
        assert max(map(len, page.splitlines())) <= 80
        shown |= {word.strip(",") for word in page.split() if word.startswith("--")}
    for name in ServerConfig.model_fields:
        assert flag(name) in shown
        assert flag(name) in overview


def test_help_about_a_flag_shows_bounds_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help=--port"]) == 0
    page = capsys.readouterr().out
    assert "--port 0..65535" in page
    assert "default: 8000" in page
    assert "--host" not in page


def test_flags_reach_the_server(served: list[ServerConfig]) -> None:
    words = "some/model --port=1 --no-enable-prefix-caching --enforce-eager --attention-backend a,b"
    words += " --attention-backend.decode=c --chunked-prefill-size -1"
    assert main(["serve", *words.split()]) == 7
    (config,) = served
    assert config.model == "some/model"
    assert config.port == 1
    assert config.enable_prefix_caching is False
    assert config.enforce_eager is True
    assert config.attention_backend == {"default": ("a", "b"), "decode": ("c",)}
    assert config.chunked_prefill_size == -1
    assert config.origin("max_num_seqs") == "default"


def test_model_is_positional_or_a_flag(
    served: list[ServerConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    main(["serve", "a"])
    main(["serve", "--model", "a"])
    assert [config.model for config in served] == ["a", "a"]
    assert "--model" in refusal(capsys, "a", "--model", "b")


def test_every_setting_has_a_flag(served: list[ServerConfig]) -> None:
    values = {
        "hf_overrides": '{"a": 1}',
        "dtype": "float32",
        "log_level": "debug",
        "log_level_http": "debug",
        "log_format": "json",
        "metrics_reporters": "[]",
        "kv_events_config": "{}",
        "schedule_policy": "priority",
        "gpu_memory_utilization": "0.5",
        "cudagraph_capture_sizes": "1,2",
        "kv_cache_memory": "1GB",
        "max_cudagraph_capture_size": "3",
        "kv_cache_dtype": "fp8_e4m3",
        "unknown_fields": "error",
        "max_header_bytes": "2048",
        "max_body_bytes": "4MiB",
        "max_body_values": "5000",
        "max_unsent_bytes": "8192",
        "root_path": "/x",
        "allowed_origins": "*",
        "kernel_backend": "greedy=a",
        "backend_option": "a.b=c",
        "deepep_mode": "normal",
        "dist_init_addr": "a:1",
        "eplb_interval": "100",
        "speculative_config": '{"method": "a"}',
        "speculative_draft_model_quantization": "unquant",
    }
    shared_experts = ["--enable-expert-parallel", "--world-size", "3"]
    sharing_engines = ["--data-parallel-size", "3", "--enable-expert-parallel"]
    needs: dict[str, list[str]] = {
        # These exclude others.
        "kv_cache_memory": [],
        "skip_tokenizer_init": [],
        "speculative_config": [],
        "all2all_backend": sharing_engines,
        "quantization_param_path": ["--kv-cache-dtype", "fp8_e4m3"],
        "ssl_keyfile": ["--ssl-certfile", "3"],
        "nnodes": ["--world-size", "3", "--dist-init-addr", "a:1"],
        "node_rank": ["--nnodes", "4", "--world-size", "4", "--dist-init-addr", "a:1"],
        "dist_init_addr": ["--nnodes", "2", "--world-size", "2"],
        "distributed_executor_backend": ["--world-size", "2"],
        "speculative_num_draft_tokens": ["--speculative-algorithm", "a"],
        "speculative_num_steps": ["--speculative-algorithm", "a"],
        "speculative_draft_model_path": ["--speculative-algorithm", "a"],
        "speculative_draft_model_quantization": ["--speculative-algorithm", "a"],
        "speculative_draft_load_format": ["--speculative-algorithm", "a"],
        "eagle3_layers_to_capture": ["--speculative-algorithm", "eagle3"],
        "enable_allreduce_fusion": ["--tp", "2"],
        "comm_fusion_max_num_tokens": ["--enable-allreduce-fusion", "--tp", "2"],
        "deepep_mode": ["--all2all-backend", "deepep", *sharing_engines],
        "enable_eplb": shared_experts,
        "num_redundant_experts": ["--enable-eplb", *shared_experts],
        "eplb_interval": ["--enable-eplb", *shared_experts],
    }

    def words(name: str) -> list[str]:
        if ServerConfig.is_switch(name):
            off = ServerConfig.model_fields[name].default is True
            return [f"--no-{flag(name)[2:]}" if off else flag(name)]
        return [flag(name), values.get(name, "3")]

    names = [name for name in ServerConfig.model_fields if name != "speculative_eagle_topk"]
    assert needs.keys() <= set(names)
    # One command line for the settings that need no other.
    lines = {name: words(name) for name in names if name not in needs}
    main(["serve", *(word for line in lines.values() for word in line)])
    together = served.pop()
    for name in names:
        config = together
        if name in needs:
            main(["serve", *words(name), *needs[name]])
            config = served.pop()
        assert config.origin(name) == flag(name)
        assert getattr(config, name) != ServerConfig.model_fields[name].default, name


@pytest.mark.parametrize("number", [0, -1, 65, 1000, "two", True])
def test_invalid_number_of_api_workers_is_refused(number: Any) -> None:
    with pytest.raises(ConfigError, match=r"api.workers"):
        ServerConfig.from_keywords(api_workers=number)


def test_dry_run_starts_no_server(
    served: list[ServerConfig], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dry_run, "dry_run", lambda config: f"block_size {config.block_size}")
    assert main(["serve", "--dry-run", "--block-size", "16"]) == 0
    assert capsys.readouterr().out == "block_size 16\n"
    assert served == []


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ("--prt 1", ("--prt", "--port")),
        ("--prt=1", ("--prt", "--port")),
        ("--page-size=16", ("--page-size", "--block-size")),
        ("--port x", ("--port x",)),
        ("--port", ("--port",)),
        ("--max-num-batched-tokens 1", ("--chunked-prefill-size",)),
        ("--help=bakends", ("--help=backends",)),
    ],
)
def test_usage_error_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: str, names: tuple[str, ...]
) -> None:
    said = refusal(capsys, *arguments.split())
    assert all(name in said for name in names), said


def test_server_error_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(config: ServerConfig) -> int:
        raise CheckpointError("/nowhere: no config.json")

    monkeypatch.setattr(server, "run", fail)
    assert refusal(capsys, "/nowhere") == "/nowhere: no config.json"


def test_debug_level_shows_the_traceback(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    done = run("serve", missing, "--port", "0", "--log-level", "debug")
    assert done.returncode == 2
    *traced, last = done.stderr.splitlines()
    # At other levels this line is the only one, which the tests of invalid checkpoints show.
    assert last.startswith("tokenspeed: ")
    assert missing in last
    assert "Traceback (most recent call last):" in traced


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("tokenspeed ser", "serve"),
        ("tokenspeed serve --max-n", "--max-num-seqs"),
        ("tokenspeed serve --attention-backend.d", "--attention-backend.decode"),
    ],
)
def test_shell_completes_commands_and_flags(typed: str, expected: str) -> None:
    completion = {
        "_TOKENSPEED_COMPLETE": "complete_bash",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(typed.count(" ")),
    }
    code = "import sys; from tokenspeed_core.cli import main; sys.exit(main([]))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **completion},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == [expected]


SPY = "import sys; print('IMPORTED', file=sys.stderr)"


def test_code_in_a_model_folder_is_not_imported(tmp_path: Path) -> None:
    config = {
        "architectures": ["LurkingForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "modeling_lurking.Model"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name in ("modeling_lurking.py", "tokenizer.py"):
        (tmp_path / name).write_text(SPY)
    info = tmp_path / "lurking-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lurking\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[tokenspeed.models]\nLurkingForCausalLM = modeling_lurking:SPEC [api1]\n"
    )
    done = run("serve", str(tmp_path), "--dry-run", cwd=tmp_path)
    assert "LurkingForCausalLM" in done.stderr
    assert "IMPORTED" not in done.stderr


@pytest.mark.parametrize(
    ("num_processors", "asked", "expected"),
    [(16, None, 2), (15, None, 1), (1, None, 1), (256, None, 2), (64, 1, 1), (2, 3, 3)],
)
def test_default_number_of_api_workers(
    monkeypatch: pytest.MonkeyPatch, num_processors: int, asked: int | None, expected: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(num_processors)))
    assert ServerConfig(api_workers=asked).num_workers() == expected
