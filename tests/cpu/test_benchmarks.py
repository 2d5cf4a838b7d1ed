"""Scripts of `benchmarks/` on a machine without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenspeed_core.api import PlatformInfo
from tokenspeed_core.worker.assemble import plan_for

FOLDER = Path(__file__).parents[2] / "benchmarks"
ENVIRON = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def script(name: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a script to its end."""
    return subprocess.run(
        [sys.executable, str(FOLDER / name), *words],
        capture_output=True,
        text=True,
        timeout=200,
        env=ENVIRON,
        check=False,
    )


def test_host_step_reports_target_floor_and_machine() -> None:
    done = script("host_step.py", "--rows", "1", "--steps", "100", "--context", "64")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["target_us"] == 100
    assert 0 < report["floor_us"] < report["median_us"]
    assert "CPUs, " in report["machine"]


def test_host_step_measures_steps_with_drafts() -> None:
    words = ("--rows", "1", "--steps", "40", "--context", "64", "--drafts", "0", "paused", "4")
    done = script("host_step.py", *words, "--worker")
    assert done.returncode == 0, done.stderr
    plain, paused, drafting = map(json.loads, done.stdout.splitlines())
    assert [plain["drafts"], paused["drafts"], drafting["drafts"]] == ["0", "paused", "4"]
    assert 0 < plain["median_us"] < drafting["median_us"]


@pytest.mark.release
def test_gpu_script_reports_a_missing_gpu() -> None:
    assert "Triton attention" in script("attention_tilings.py", "--help").stdout
    done = script("attention_tilings.py")
    assert (done.returncode, "CUDA device" in done.stderr.splitlines()[-1]) == (2, True)


def test_deepseek_layers_have_kernels_on_an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    layers = import_module("deepseek_v3_layers")
    config = {**layers.REDUCED, "num_hidden_layers": 1}
    reference = dict.fromkeys(layers.COMPARED, "torch")
    for is_captured, chosen in ((True, {}), (False, reference)):
        resolved, catalog = layers.resolved(config, "cuda", chosen, is_captured=is_captured)
        plan = plan_for(resolved, catalog, PlatformInfo("cuda", (9, 0)))
        backends = {planned.op: planned.backend for planned in plan.ops}
        expected = chosen or dict.fromkeys(reference, "triton")
        assert {op: backends[op] for op in expected} == expected


@pytest.mark.release
def test_deepseek_layers_are_checked_and_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    layers = import_module("deepseek_v3_layers")
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "n_routed_experts": 16}
    sizes |= {"num_attention_heads": 4, "q_lora_rank": 128, "n_group": 4, "topk_group": 2}
    tiny = {**layers.PUBLISHED, **sizes, "num_experts_per_tok": 4}

    def timed(run: Any, num_layers: int) -> float:
        for layer in range(num_layers):
            run(layer)
        return 1.0

    for name, value in {
        "REDUCED": tiny,
        "CHECKED": (layers.Step(3, 1, 40), layers.Step(1, 64, 64)),
        "CONTEXT": 64,
        "PREFILL": 128,
        "DECODES": (1, 3),
        "timed": timed,
    }.items():
        monkeypatch.setattr(layers, name, value)
    device = torch.device("cpu")
    layers.check(device, {})
    with torch.inference_mode():
        found = list(layers.rows(layers.Layers(tiny, 2, device, {}, 3 * 64)))
    assert [row["step"] for row in found[::2]] == ["decode 1 x 64", "decode 3 x 64", "prefill 128"]
    assert all(row["floor"] > 0 for row in found)


@pytest.mark.release
def test_demo_models_are_scored_by_backend(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    words = ["--device", "cpu", "--items", "20", "--tasks", "copy", "--seconds", "600", "--runs"]
    words += ["demo-deepseek: MLA torch", "demo: fa3"]
    monkeypatch.setattr(sys, "argv", ["demo_scores.py", *words])
    with pytest.raises(SystemExit) as ended:
        import_module("demo_scores").main()
    _, scores, kernels, refused, _ = capsys.readouterr().out.splitlines()
    assert ended.value.code == 0
    assert scores.split()[3:5] == ["2", "100.0%"]
    assert "mla_decode torch" in kernels
    assert "cannot run: fa3" in refused


@pytest.mark.release
def test_verification_is_timed_after_a_check() -> None:
    sizes = ("--rows", "2", "--drafts", "3", "--context", "32", "--steps", "3", "--tokens", "24")
    done = script("verification.py", "--shape", "small", *sizes)
    assert done.returncode == 0, done.stderr
    _, check, plain, drafted, user, _ = map(json.loads, done.stdout.splitlines())
    assert check["accepted"] > 0
    assert (plain["ratio"], drafted["drafts"]) == (1.0, 3)
    assert user["drafts_per_step"] > 0


def test_prefill_budget_is_simulated_in_virtual_time() -> None:
    done = script("paced_gaps.py", "--users", "8", "--requests", "32", "--min-ms", "12", "9")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.count(f"{bound} ms: ") for line, bound in zip(lines, (12, 9), strict=True)] == [
        1,
        1,
    ]
    assert all(float(line.partition(": ")[2].split()[0]) > 1000 for line in lines), lines


def test_times_of_a_chat_turn_are_reported() -> None:
    done = script("chat_turns.py", "--turns", "2", "--first-chars", "16000")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["tokens"] > 10_000
    assert min(report[name] for name in ("json_ms", "kept_ms", "new_ms", "floor_ms")) > 0


def test_times_of_delivery_are_reported() -> None:
    done = script("async_delivery.py", "4", "8", "--rounds", "1")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert min(report["iterators_us"], report["sinks_us"]) > 0
