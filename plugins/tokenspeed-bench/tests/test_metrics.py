"""Metrics of requests with known times."""

from __future__ import annotations

import random

import numpy as np
import pytest
from tokenspeed_bench.metrics import (
    Record,
    first_turns_apart,
    meets,
    of_records,
    over_time,
    percentile,
    spread,
)


def record(sent: float, first: float, gap: float, num: int, **more: int) -> Record:
    events = [sent + first + gap * i for i in range(num)]
    return Record(sent, events, num, events[-1], **more)


@pytest.mark.parametrize("num", [1, 2, 3, 10, 101, 1000])
def test_percentiles_equal_numpys(num: int) -> None:
    rng = random.Random(num)
    values = sorted(rng.expovariate(1.0) for _ in range(num))
    for percent in (0, 1, 37.5, 50, 90, 99, 100):
        assert percentile(values, percent) == pytest.approx(
            np.percentile(values, percent), rel=1e-12
        )


def test_percentile_of_no_values_is_refused() -> None:
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)
    assert spread("itl", []) == {}


def test_metrics_of_known_times() -> None:
    records = [
        record(0.0, 0.1, 0.01, 11, num_prompt=100, num_cached=60),
        record(1.0, 0.3, 0.02, 11, num_prompt=50, num_cached=0),
    ]
    figures = of_records(records, {})
    assert figures["s"] == pytest.approx(1.5)
    assert figures["out_per_s"] == pytest.approx(22 / 1.5, abs=0.1)
    assert (figures["ttft_p50_ms"], figures["ttft_max_ms"]) == (200.0, 300.0)
    assert (figures["itl_p50_ms"], figures["itl_max_ms"]) == (15.0, 20.0)
    assert figures["e2e_max_ms"] == 500.0
    assert (figures["prompt_tokens"], figures["cached_tokens"], figures["uncached_tokens"]) == (
        150,
        60,
        90,
    )
    assert figures["event_share"] == 1.0


def test_shared_events_lower_the_event_share() -> None:
    assert of_records([Record(0.0, [0.1, 0.2], 4, 0.2)], {})["event_share"] == 0.5


def test_unreported_cached_tokens_are_omitted() -> None:
    assert "cached_tokens" not in of_records([record(0.0, 0.1, 0.01, 3, num_prompt=5)], {})
    assert "prompt_tokens" not in of_records([record(0.0, 0.1, 0.01, 3)], {})


@pytest.mark.parametrize(
    ("goals", "share"),
    [
        ({"ttft": 150.0}, 0.5),
        ({"ttft": 400.0}, 1.0),
        ({"itl": 15.0}, 0.5),
        ({"ttft": 400.0, "itl": 5.0}, 0.0),
        ({"tpot": 21.0}, 1.0),
        ({"e2e": 250.0}, 0.5),
    ],
)
def test_goodput_counts_requests_that_meet_all_goals(goals: dict[str, float], share: float) -> None:
    records = [record(0.0, 0.1, 0.01, 11), record(0.0, 0.3, 0.02, 11)]
    figures = of_records(records, goals)
    assert figures["good_share"] == share
    assert figures["good_per_s"] == pytest.approx(share * 2 / 0.5, abs=1e-3)


def test_failed_request_counts_against_goodput() -> None:
    records = [record(0.0, 0.1, 0.01, 11)] * 3
    figures = of_records(records, {"ttft": 150.0}, num_failed=1)
    assert (figures["answered"], figures["failed"]) == (3, 1)
    assert figures["good_share"] == 0.75
    assert figures["good_per_s"] == pytest.approx(3 / 0.2)


def test_long_gap_misses_the_itl_goal() -> None:
    assert not meets(Record(0.0, [0.1, 0.11, 1.0], 3, 1.0), {"itl": 100.0})


def test_first_and_later_turns_are_separate() -> None:
    first, later = record(0.0, 1.0, 0.01, 3), record(5.0, 0.1, 0.01, 3, turn=1)
    apart = first_turns_apart([first, later])
    assert (apart["ttft_first_turn_p50_ms"], apart["ttft_later_turn_p50_ms"]) == (1000.0, 100.0)
    assert first_turns_apart([first]) == {}


def test_time_bins_hold_every_event_and_gap() -> None:
    series = over_time([record(0.0, 0.1, 0.01, 91)])
    assert sum(series["events_per_s"]) * series["bin_s"] == pytest.approx(91, rel=0.02)
    assert series["itl_p50_ms"][0] is None
    assert series["itl_p50_ms"][-1] == pytest.approx(10.0)
    assert series["ttft"] == [[0.0, 100.0]]
