"""Scripts of `benchmarks/` on a machine without a GPU."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenspeed_core.api import DOTS, Capability, KernelSpec, PlatformInfo, Ranking
from tokenspeed_core.kernels.installed import InstalledKernel, installed_kernels, installed_ops
from tokenspeed_core.plugins import Catalog
from tokenspeed_core.worker.assemble import plan_for
from tokenspeed_kernels import rankings
from tokenspeed_kernels.reference import moe

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
    assert min(plain["median_us"], paused["median_us"], drafting["median_us"]) > 0
    assert drafting["critical_us"] > 0


@pytest.mark.release
def test_draft_choice_compares_engines_with_and_without_drafts() -> None:
    words = ("--tasks", "copy", "--items", "8", "--engines", "none,paused,all,chosen")
    done = script("draft_choice.py", *words)
    assert done.returncode == 0, done.stderr
    _, plain, paused, drafting, chosen = map(json.loads, done.stdout.splitlines())
    assert drafting["steps"] < plain["steps"] == paused["steps"]
    assert drafting["accepted_per_drafted"] > 1 > paused["drafted"]
    assert drafting["steps"] < chosen["steps"] <= plain["steps"]


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
    sizes = ("--rows", "2", "--drafts", "3", "--context", "32", "--steps", "3", "--tokens", "300")
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


def rank(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """Run rank_kernels.py as on a device of compute capability 1.0, which has no rankings."""
    monkeypatch.syspath_prepend(FOLDER)
    script = import_module("rank_kernels")
    fake = PlatformInfo("cpu", (1, 0), "fake device")
    monkeypatch.setattr(script, "describe_device", lambda device: fake)
    sizes = ("--device", "cpu", "--shapes", "small", "--tokens", "1", "5")
    monkeypatch.setattr(sys, "argv", ["rank_kernels.py", *words, *sizes])
    status: int = script.main()
    return status


def doubled(problem: Any) -> Any:
    """Return experts whose results are wrong."""
    experts = moe.moe_experts(problem)
    return lambda *arguments: 2 * experts(*arguments)


@pytest.mark.release
def test_backends_of_experts_are_timed_and_ranked() -> None:
    ops = ("moe_experts", "moe_experts_fp8_block", "moe_experts_w4a16", "moe_experts_int8_static")
    words = (*ops, "--device", "cpu", "--shapes", "small", "--tokens", "1", "3")
    done = script("rank_kernels.py", *words)
    assert done.returncode == 0, done.stderr
    for op in ops:
        assert f"{op} small, 3 tokens: lower bound -, torch" in done.stdout
        assert f"{op} torch: 1.00 times the best time, geometric mean of 2 sizes" in done.stdout
    refused = script("rank_kernels.py", *words, "--out", "rankings.py")
    assert (refused.returncode, "--out needs a GPU" in refused.stderr) == (2, True)


def test_new_rankings_keep_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rankings.py"
    for op in ("moe_experts", "moe_experts_fp8", "moe_experts"):
        assert rank(monkeypatch, op, "--out", str(path)) == 0
    written = runpy.run_path(str(path))["RANKINGS"]
    assert written[: len(rankings.RANKINGS)] == rankings.RANKINGS
    added = written[len(rankings.RANKINGS) :]
    assert [(each.op, each.phase, each.compute_capability) for each in added] == [
        ("moe_experts", None, (1, 0)),
        ("moe_experts_fp8", None, (1, 0)),
    ]
    ((backend, figure),) = added[0].figures
    assert (backend, "sizes on fake device" in figure) == ("torch", True)


def test_wrong_backend_gets_no_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    capability = Capability(("cpu",), ("bfloat16",))
    specs = (
        KernelSpec("moe_experts", "doubled", capability, f"{__name__}:doubled"),
        KernelSpec("moe_experts", "broken", capability, "no_such_module:make"),
    )
    monkeypatch.setattr(
        import_module("rank_kernels"),
        "installed_kernels",
        lambda catalog: [
            *installed_kernels(catalog),
            *(InstalledKernel(each, "tokenspeed-kernels") for each in specs),
        ],
    )
    assert rank(monkeypatch, "moe_experts") == 1
    output = capsys.readouterr().out
    assert "FAILED moe_experts doubled, which gets no rank: small, 1 tokens: Assertion" in output
    assert "FAILED moe_experts broken, which gets no rank: ModuleNotFoundError" in output
    ranked = [line.split()[1] for line in output.splitlines() if "times the best time" in line]
    assert ranked == ["torch:"]


def test_backends_are_ranked_by_mean_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    script = import_module("rank_kernels")
    measured = {"one": (10.0, 10.0, 400.0), "two": (20.0, 20.0, 100.0)}
    times = [
        script.Time(backend, "small", num_tokens, microseconds, backend == "one")
        for backend, found in measured.items()
        for num_tokens, microseconds in zip((1, 16, 8192), found, strict=True)
    ]
    (first, _), (second, figure) = script.ranked(times, "fake device")
    assert (first, second) == ("one", "two")  # both lose by a factor of four, "one" only once
    assert figure == (
        "1.59 times the best time, geometric mean of 3 sizes on fake device without CUDA graphs; "
        "µs for 1, 16, 8192 tokens: small 20.0, 20.0, 100.0"
    )


@pytest.mark.parametrize("wrong", [(7, slice(None)), (slice(None), slice(8)), (7, 3)])
def test_wrong_tokens_and_features_are_found(
    monkeypatch: pytest.MonkeyPatch, wrong: tuple[Any, Any]
) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    agree = import_module("rank_kernels").agree
    expected = torch.randn((400, 512), generator=torch.Generator().manual_seed(0))
    found, tolerance = expected.clone(), DOTS[1]
    agree(found, expected, tolerance)
    found[wrong] = float("nan") if wrong == (7, 3) else 0.0
    with pytest.raises(AssertionError, match="wrong"):
        agree(found, expected, tolerance)


def test_lower_bound_counts_used_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    script = import_module("rank_kernels")
    contract = installed_ops(Catalog.discover())["moe_experts"]
    problem = script.problem_of(contract, "small")
    weights = script.make_weights(contract, problem, torch.device("cpu"))
    assert [len(weights[name]) for name in ("gate_up", "down")] == [8, 8]
    arguments = weights | script.route(problem, 1, torch.device("cpu"))
    num_bytes = 2 * (2 * 3 * 128 * 128) + 2 * (2 * 128)  # two experts, x and y in bfloat16
    for best, expected in (
        (script.Ceilings(1e6, 1e30), num_bytes),
        (script.Ceilings(1e30, 1e6), 2 * 6 * 128 * 128),
    ):
        assert script.lower_bound(contract, problem, arguments, best) == pytest.approx(expected)


def test_file_of_rankings_is_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    ranking_file = import_module("ranking_file")
    source = Path(rankings.__file__).read_text()
    assert ranking_file.text_of(rankings.RANKINGS) == source


def test_attention_rankings_keep_other_ops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    runs, path = tmp_path / "runs.jsonl", tmp_path / "rankings.py"
    other = Ranking("moe_experts", None, (9, 0), (("triton", "1 µs"),))
    old = Ranking("attention", "decode", (9, 0), (("old", "1 s"),))
    path.write_text(import_module("ranking_file").text_of([old, other]))
    facts = {"workload": "latency", "shape": "small", "platform": "fake device"}
    lines = (
        {**facts, "s": seconds, "backends": {"attention": ["fa3", decode]}}
        for decode, seconds in (("fa3", 2.0), ("triton", 1.0))
    )
    runs.write_text("\n".join(map(json.dumps, lines)))
    words = ["rank_attention.py", str(runs), "--capability", "9.0", "--out", str(path)]
    monkeypatch.setattr(sys, "argv", words)
    import_module("rank_attention").main()
    decode, kept = runpy.run_path(str(path))["RANKINGS"]
    assert kept == other
    assert decode.figures == (
        ("triton", "small on fake device: latency 1.00 s"),
        ("fa3", "small on fake device: latency 2.00 s"),
    )


@pytest.mark.parametrize("kind", ["none", "int4", "mxfp4", "block"])
def test_moe_decode_changes_the_limits_of_few_tokens(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    moe_decode = import_module("moe_decode")
    few_tokens = moe_decode.few_tokens
    problem = moe_decode.MODELS["qwen3-30b-a3b"]
    before = few_tokens.max_pairs(problem, kind)
    with moe_decode.limited(moe_decode.MAX_SIZE, 64.0):
        assert few_tokens.max_pairs(problem, kind) == 64 * problem["num_experts"]
    with moe_decode.limited(0, 0.0):
        assert few_tokens.max_pairs(problem, kind) == 0
    assert few_tokens.max_pairs(problem, kind) == before > 0


def test_speedup_of_turns_has_an_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    speedup = import_module("speculation").speedup
    # Both engines slow down together, which their ratio does not show.
    plain = [1.0 + turn % 3 for turn in range(30)]
    assert speedup(plain, [each / 2 for each in plain]) == (2.0, [2.0, 2.0])
    ratio, (low, high) = speedup(
        plain, [each * (1.2 if turn % 2 else 0.8) for turn, each in enumerate(plain)]
    )
    assert low < ratio < high
    assert 0.9 < low < 1.0 < high < 1.15
