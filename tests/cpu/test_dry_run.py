"""The dry run makes the same report and errors as a start, without loading weights."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from shutil import copy
from typing import Any

import pytest
from tokenspeed_demo.score import CHECKPOINT
from tokenspeed_server import serve as server
from tokenspeed_server.dry_run import dry_run
from tokenspeed_server.serve import run
from tokenspeed_server.settings import ServerConfig

from tokenspeed_core import llm
from tokenspeed_core.checkpoint.resolve import resolve_checkpoint
from tokenspeed_core.config import Config
from tokenspeed_core.engine.factory import discover, resolve
from tokenspeed_core.engine.subprocesses import Program
from tokenspeed_core.errors import CheckpointError, ConfigError, PluginError


def start_llm(config: ServerConfig) -> None:
    llm.LLM(config.model, revision=config.revision, download_dir=config.download_dir)


def test_dry_run_reports_tokenizer_and_template(
    tmp_path: Path,
) -> None:
    report = dry_run(ServerConfig(device="cpu"))
    assert "chat template: from the model" in report
    assert "left_bytes" not in report
    assert "known after start" not in report
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages }}")
    assert f"chat template: {template}" in dry_run(
        ServerConfig(device="cpu", chat_template=str(template))
    )
    assert "tokenizer none" in dry_run(ServerConfig(device="cpu", skip_tokenizer_init=True))


def test_dry_run_reports_drafter_and_its_model() -> None:
    assert "drafter none\n" in dry_run(ServerConfig(device="cpu"))
    report = dry_run(
        ServerConfig(
            device="cpu",
            speculative_algorithm="eagle3",
            speculative_draft_model_path="demo-eagle3",
            speculative_num_steps=3,
        )
    )
    line = next(line for line in report.splitlines() if line.startswith("drafter "))
    assert line.startswith("drafter eagle3 of tokenspeed-models ")
    assert "at most 3 draft tokens per row, 1,377,280 parameters" in line
    assert "checkpoint_eagle3" in line


def test_dry_run_refuses_a_drafter_without_weights(tmp_path: Path) -> None:
    copy(CHECKPOINT.parent / "checkpoint_eagle3" / "config.json", tmp_path)
    settings = {
        "device": "cpu",
        "speculative_algorithm": "eagle3",
        "speculative_draft_model_path": str(tmp_path),
    }
    with pytest.raises(CheckpointError, match=f"{tmp_path}: no weight files"):
        dry_run(ServerConfig(**settings))
    assert "drafter eagle3" in dry_run(
        ServerConfig(**settings, speculative_draft_load_format="dummy")
    )


@pytest.mark.parametrize(
    ("settings", "value"), [({}, "2 (auto)"), ({"api_workers": 1}, "1 (Python)")]
)
def test_dry_run_reports_api_workers_and_their_origin(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, int], value: str
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(16)))
    assert f"  api_workers: {value}\n" in dry_run(
        ServerConfig.from_keywords(device="cpu", **settings)
    )


@pytest.mark.parametrize(
    ("settings", "error", "name"),
    [
        ({"tokenizer": "/nope"}, CheckpointError, "--tokenizer /nope"),
        ({"chat_template": "/nope.jinja"}, CheckpointError, "/nope.jinja"),
        ({"load_format": "nonsense"}, PluginError, "'nonsense'"),
        ({"schedule_policy": "prioritty"}, PluginError, "priority"),
        ({"tp": 2, "distributed_executor_backend": "mpi"}, PluginError, "'mpi'"),
        ({"ep_size": 2}, ConfigError, "--expert-parallel-size has no effect"),
        ({"ep_size": 1}, ConfigError, "--expert-parallel-size has no effect"),
        ({"tp": 2, "moe_tp_size": 1}, ConfigError, "--moe-tp-size has no effect"),
        (
            {"tp": 4, "attn_tp_size": 1, "dense_tp_size": 2},
            ConfigError,
            "all 4 processes (--tensor-parallel-size 4 --attn-tp-size 1 --dense-tp-size 2)",
        ),
        (
            {"data_parallel_size": 2, "enable_expert_parallel": True},
            ConfigError,
            "--enable-expert-parallel has no effect",
        ),
        ({"mla_chunk_multiplier": 4}, ConfigError, "--mla-chunk-multiplier has no effect"),
    ],
)
def test_dry_run_refuses_the_settings_a_start_refuses(
    settings: dict[str, Any], error: type[Exception], name: str
) -> None:
    with pytest.raises(error) as caught:
        dry_run(ServerConfig.from_keywords(device="cpu", **settings))
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_dry_run_reads_how_many_layers_a_head_combines() -> None:
    config = {"method": "eagle3", "model": "demo-eagle3", "layers_to_capture": [1]}
    with pytest.raises(ConfigError, match="3 layers with --eagle3-layers-to-capture") as caught:
        dry_run(ServerConfig.from_keywords(device="cpu", speculative_config=config))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("settings", [{"uds": "x", "port": 1}, {"ssl_certfile": "/nope"}])
def test_dry_run_refuses_wrong_addresses(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"--uds|--ssl-certfile"):
        dry_run(ServerConfig.from_keywords(device="cpu", **settings))


def test_dry_run_reports_settings_without_effect() -> None:
    report = dry_run(
        ServerConfig.from_keywords(device="cpu", enforce_eager=True, max_prefill_tokens=9)
    )
    assert "  enforce_eager: on (Python): no effect on a CPU\n" in report
    assert "  max_prefill_tokens: 9 (Python): no effect unless --chunked-prefill-size" in report


@pytest.mark.parametrize("setting", ["revision", "download_dir"])
@pytest.mark.parametrize("is_path", [False, True])
@pytest.mark.parametrize("start", [dry_run, run, start_llm])
def test_hub_settings_without_effect_are_refused(
    start: Callable[[ServerConfig], Any], is_path: bool, setting: str
) -> None:
    model = CHECKPOINT if is_path else "demo"
    with pytest.raises(ConfigError) as caught:
        start(ServerConfig(model=str(model), device="cpu", port=0, **{setting: "x"}))
    assert setting in str(caught.value).replace("-", "_")
    assert "\n" not in str(caught.value)


def test_server_processes_get_the_downloaded_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    downloaded = resolve_checkpoint(ServerConfig(), discover(ServerConfig()))
    engines: list[Program] = []
    monkeypatch.setattr(server, "resolve_checkpoint", lambda config, catalog: downloaded)
    monkeypatch.setattr(server, "Supervisor", lambda programs, *rest: engines.extend(programs))
    monkeypatch.setattr(server, "serve", lambda worker, supervisor: 0)
    hub = {"model": "maker/tiny", "revision": "v2", "download_dir": str(tmp_path)}
    assert run(ServerConfig(device="cpu", port=0, **hub)) == 0
    config = ServerConfig.from_wire(engines[0].data["config"])
    assert config.model == str(downloaded.path)
    assert resolve_checkpoint(config, discover(config)).path == downloaded.path


@pytest.mark.parametrize(
    ("model", "draft", "revision"),
    [(str(CHECKPOINT), "maker/tiny", None), ("maker/tiny", str(CHECKPOINT), "v2")],
)
def test_one_of_target_and_draft_model_may_be_downloaded(
    monkeypatch: pytest.MonkeyPatch, model: str, draft: str, revision: str | None
) -> None:
    downloads = []

    def download(*arguments: Any) -> Path:
        downloads.append(arguments[:3])
        return CHECKPOINT

    monkeypatch.setattr("tokenspeed_core.checkpoint.resolve.download", download)
    config = Config.from_keywords(
        model=model,
        revision=revision,
        download_dir="folder",
        speculative_algorithm="draft_model",
        speculative_draft_model_path=draft,
    )
    catalog = discover(config)
    resolved = resolve(config, catalog, with_weights=False)
    assert downloads == [("maker/tiny", revision, "folder")]
    # The other ranks get the directory, and the settings that the draft model needs.
    of_rank = resolved.config.resolved(model=str(resolved.checkpoint.path))
    resolve(of_rank, catalog, with_weights=False)
    assert downloads[1:] == ([] if revision else [("maker/tiny", None, "folder")])


@pytest.mark.parametrize("draft", [str(CHECKPOINT), "demo"])
def test_download_folder_is_refused_if_both_models_are_local(draft: str) -> None:
    config = Config.from_keywords(
        model=str(CHECKPOINT),
        download_dir="folder",
        speculative_algorithm="draft_model",
        speculative_draft_model_path=draft,
    )
    with pytest.raises(ConfigError, match="download_dir"):
        resolve(config, discover(config), with_weights=False)


def test_missing_tokenizer_fails_before_weights_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        llm, "start", lambda *arguments, **keywords: pytest.fail("the engine was started")
    )
    with pytest.raises(CheckpointError, match="--tokenizer /nope"):
        llm.LLM(device="cpu", tokenizer="/nope")


def test_weights_of_one_of_several_processes_are_known() -> None:
    def weight_bytes(**sizes: Any) -> int:
        config = ServerConfig.from_keywords(model="demo-deepseek", device="cpu", **sizes)
        found = re.search(r"weight_bytes: ([\d,]+)", dry_run(config))
        assert found
        return int(found[1].replace(",", ""))

    whole = weight_bytes()
    experts = 3 * 16 * 3 * 256 * 64 * 2  # layers, experts, projections, sizes, bytes of a bfloat16
    shared = weight_bytes(data_parallel_size=2, enable_expert_parallel=True)
    assert whole - shared >= experts // 2
    assert whole // 2 < weight_bytes(tensor_parallel_size=2) < shared
