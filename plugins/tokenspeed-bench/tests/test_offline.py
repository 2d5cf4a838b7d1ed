"""Measuring in process, with a fake engine."""

from __future__ import annotations

from typing import Any

import pytest
from fake_llm import FakeLLM
from tokenspeed_bench import result as results
from tokenspeed_bench.errors import BenchError
from tokenspeed_bench.offline import NUM_FIRST, Offline, measure
from tokenspeed_bench.traffic import Traffic, of_workload

SHORT = {
    "latency": {"in_len": 8, "out_len": 4},
    "agentic": dict(num_sessions=3, num_turns=2, system_len=10, observation_len=4, out_len=2),
}


def short(*names: str) -> list[Traffic]:
    return [of_workload(name, **SHORT[name]) for name in names]


def measured(
    llm: FakeLLM, *names: str, repeats: int = 3, **more: Any
) -> tuple[dict[str, Any], list[str]]:
    result = results.new("offline", "fake", None, {})
    refused = measure(
        lambda: llm, Offline(short(*names), repeats), result, lambda run: None, **more
    )
    return result, refused


def test_result_holds_start_and_repeats() -> None:
    llm = FakeLLM()
    result, refused = measured(llm, "latency", "agentic")
    assert refused == []
    assert [run["traffic"]["name"] for run in result["runs"]] == ["start", "latency", "agentic"]
    start, latency, agentic = result["runs"]
    assert start["figures"]["first_over_median"] > 0
    assert len(latency["repeats_s"]) == 3
    assert latency["figures"]["s"] == min(latency["repeats_s"])
    assert latency["figures"]["output_tokens"] == 4
    assert agentic["figures"]["prompt_tokens"] == 3 * (14 + 20)
    assert agentic["figures"]["cached_tokens"] + agentic["figures"]["uncached_tokens"] == 3 * (
        14 + 20
    )
    assert llm.is_shut_down


def test_prefix_cache_is_reset_before_every_repeat() -> None:
    llm = FakeLLM()
    measured(llm, "agentic", repeats=2)
    before = NUM_FIRST + 1
    assert llm.resets == [before, before + 2]


def test_result_holds_kernel_plan_and_backends() -> None:
    result, _ = measured(FakeLLM(), "latency")
    assert result["backends"] == {"attention": ["fake", "other"]}
    assert result["device"] == "FAKE GPU"
    assert result["kernel_plan"]["ops"][0]["op"] == "attend"


def test_slow_first_request_is_visible() -> None:
    result, _ = measured(FakeLLM(slow=0.1), "latency")
    assert result["runs"][0]["figures"]["first_over_median"] > 5
    assert result["runs"][0]["figures"]["first_request_ms"] >= 100


def test_small_vocabulary_folds_ids() -> None:
    result, _ = measured(FakeLLM(vocab_size=2_000), "latency")
    assert result["runs"][1]["traffic"]["end_id"] == 1_500


def test_too_small_vocabulary_is_refused() -> None:
    with pytest.raises(BenchError, match="fewer than 200"):
        measured(FakeLLM(vocab_size=50), "latency")


def test_traffic_beyond_the_context_is_skipped() -> None:
    result = results.new("offline", "fake", None, {})
    traffics = [of_workload("prefill", num_requests=1, in_len=500, out_len=1), *short("latency")]
    refused = measure(lambda: FakeLLM(max_len=200), Offline(traffics, 1), result, lambda run: None)
    assert len(refused) == 1
    assert refused[0].startswith("prefill was left out: the context is 200")
    assert [run["traffic"]["name"] for run in result["runs"]] == ["start", "latency"]


def test_model_with_tiny_context_is_refused() -> None:
    with pytest.raises(BenchError, match="does not accept a prompt of 128 tokens"):
        measured(FakeLLM(max_len=100), "latency")


def test_ctrl_c_keeps_finished_repeats() -> None:
    llm = FakeLLM(raise_at=NUM_FIRST + 1 + 2)
    result, _ = measured(llm, "latency", "agentic")
    assert result["is_interrupted"]
    assert [run["traffic"]["name"] for run in result["runs"]] == ["start", "latency"]
    assert len(result["runs"][1]["repeats_s"]) == 2
    assert llm.is_shut_down


def test_each_traffic_runs_once_more_for_the_trace() -> None:
    llm = FakeLLM()
    traced: list[tuple[str, int]] = []

    def trace(name: str, work: Any) -> None:
        before = len(llm.calls)
        work()
        traced.append((name, len(llm.calls) - before))

    measured(llm, "latency", "agentic", repeats=2, trace=trace)
    assert traced == [("latency", 1), ("agentic", 2)]
