"""The draft tokens of a run, from the counters of an engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_llm import FakeLLM
from hypothesis import given
from hypothesis import strategies as st
from misbehaving import good, serving
from tokenspeed_bench import result as results
from tokenspeed_bench.command import bench
from tokenspeed_bench.offline import Offline, measure
from tokenspeed_bench.speculation import DraftCounts, histogram, read_counts
from tokenspeed_bench.table import of_run
from tokenspeed_bench.traffic import load


def page(
    steps: int,
    drafts: int,
    accepted: list[int],
    outputs: int,
    prefix: str,
    drafted: tuple[int, ...] = (),
) -> str:
    """Return the metrics page of a server with two engines, each with these counters."""
    lines = []
    for engine in range(2):
        labels = f'engine="{engine}",model_name="a{{b}} 1"'
        for name, value in (
            ("spec_decode_num_drafts", steps),
            ("spec_decode_num_draft_tokens", drafts),
            ("generation_tokens", outputs),
        ):
            lines += [f"# TYPE {prefix}:{name}_total counter"]
            lines += [f"{prefix}:{name}_total{{{labels}}} {float(value)}"]
            lines += [f"{prefix}:{name}_created{{{labels}}} 1.7e+09"]
        for what, counts in (("accepted", accepted), ("draft", drafted)):
            name = f"{prefix}:spec_decode_num_{what}_tokens_per_pos_total"
            for place, num in enumerate(counts):
                lines += [f'{name}{{{labels},position="{place}"}} {float(num)}']
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("prefix", ["tokenspeed", "vllm"])
def test_counters_of_all_engines_are_added(prefix: str) -> None:
    found = read_counts(page(10, 30, [8, 5, 1], 24, prefix))
    assert found == DraftCounts(20, 60, (16, 10, 2), 48)
    found = read_counts(page(10, 18, [8, 5], 24, prefix, (10, 6, 2)))
    assert found == DraftCounts(20, 36, (16, 10), 48, (20, 12, 4))


def test_acceptance_at_a_position_is_the_share_of_drafts_there() -> None:
    before = DraftCounts(10, 10, (5,), 15, (10,))
    after = DraftCounts(110, 140, (65, 15), 190, (110, 30))
    figures = after.since(before).figures()
    assert figures["drafted_at_position"] == [100, 30]
    assert figures["accepted_at_position"] == [0.6, 0.5]


def test_server_without_speculation_has_no_counts() -> None:
    assert read_counts("# HELP x\nx:generation_tokens_total 3\n") is None


@given(st.lists(st.integers(0, 4), min_size=1))
def test_histogram_adds_up(accepted: list[int]) -> None:
    at_position = tuple(sum(each > place for each in accepted) for place in range(4))
    figures = DraftCounts(len(accepted), 4 * len(accepted), at_position).figures()
    assert figures["accepted_per_step"] == [accepted.count(num) for num in range(1 + max(accepted))]
    assert figures["accepted_tokens"] == sum(accepted)
    assert figures["tokens_per_step"] == pytest.approx(1 + sum(accepted) / len(accepted), abs=1e-4)


def test_histogram_draws_a_bar_per_number_of_accepted_drafts() -> None:
    summary, none, one, two = histogram(DraftCounts(100, 300, (60, 20)).figures())
    assert "26.7 % of 300 accepted, 1.80 tokens per step" in summary
    assert [line.count("#") for line in (none, one, two)] == [40, 40, 20]
    assert "position 1 accepted in 60.0 %" in one
    assert "position 2 accepted in 20.0 %" in two


def test_offline_run_has_its_own_draft_tokens() -> None:
    result = results.new("offline", "m", None, {})
    plan = Offline([load(2, 16, 4, is_fixed=True)], repeats=2)
    measure(lambda: FakeLLM(drafts=True), plan, result, lambda run: None)
    run = result["runs"][-1]
    assert run["speculation"]["steps"] == 4, "two calls, without the calls that warm up"
    assert run["speculation"]["accepted_per_step"] == [0, 2, 2]
    assert "draft tokens: 50.0 % of 12" in of_run(run)


def test_offline_run_without_drafts_has_no_entry() -> None:
    result = results.new("offline", "m", None, {})
    measure(FakeLLM, Offline([load(2, 16, 4, is_fixed=True)]), result, lambda run: None)
    assert "speculation" not in result["runs"][-1]


def test_run_of_a_paused_drafter_says_so() -> None:
    result = results.new("offline", "m", None, {})
    plan = Offline([load(2, 16, 4, is_fixed=True)])
    measure(lambda: FakeLLM(is_draft_paused=True), plan, result, lambda run: None)
    run = result["runs"][-1]
    assert run["speculation"]["draft_tokens"] == 0
    assert "draft tokens: none" in of_run(run)


def test_paused_server_is_recognized() -> None:
    gauge = 'tokenspeed:spec_decode_paused{engine="1"} 1.0\n'
    found = read_counts(page(0, 0, [], 24, "tokenspeed") + gauge)
    assert found is not None
    assert found.is_paused


def test_served_run_has_its_own_draft_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--users", "1", "--requests", "3", "--output-len", "4", "--no-client-cost"]
    with serving(good) as fake:
        fake.metrics = lambda num: page(num, 2 * num, [num], 6 * num, "tokenspeed")
        assert bench(["serve", "--url", fake.url, *words, "--json", str(tmp_path / "x")]) == 0
    run = json.loads((tmp_path / "x").read_text())["runs"][-1]
    assert run["speculation"]["steps"] == 6, "of two engines, for three requests"
    assert run["speculation"]["accepted_at_position"] == [1.0]
    assert "6 steps" in capsys.readouterr().out
