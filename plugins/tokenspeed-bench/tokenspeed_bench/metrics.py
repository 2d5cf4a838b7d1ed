"""Metrics of measured requests: percentiles, rates, goodput, and series over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PERCENTILES = (50, 90, 99)
NUM_BINS = 120  # of a run's time, for the plot
MAX_POINTS = 2000  # first-token times that a result keeps, for the plot
GOALS = ("ttft", "itl", "tpot", "e2e")


@dataclass(frozen=True, slots=True)
class Record:
    """One answered request. Times are seconds of one clock; `events` are arrival times of text events.

    `num_prompt` and `num_cached` come from the server, or are None. `turn` is the position in the
    session.
    """

    sent: float
    events: list[float]
    num_tokens: int
    done: float
    num_prompt: int | None = None
    num_cached: int | None = None
    turn: int = 0

    def first(self) -> float:
        """Return the time to first token in seconds."""
        return self.events[0] - self.sent

    def gaps(self) -> list[float]:
        """Return the seconds between events."""
        return [b - a for a, b in zip(self.events, self.events[1:], strict=False)]


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return a percentile of sorted values by linear interpolation. Raises ValueError without values."""
    if not ordered:
        raise ValueError("no values to take a percentile of")
    at = (len(ordered) - 1) * percent / 100
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def spread(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Return percentiles, mean and maximum in milliseconds, or nothing without values."""
    if not seconds:
        return {}
    ordered = sorted(seconds)
    values = {f"p{percent}": percentile(ordered, percent) for percent in PERCENTILES}
    values |= {"mean": sum(ordered) / len(ordered), "max": ordered[-1]}
    return {f"{name}_{key}_ms": round(1e3 * value, 3) for key, value in values.items()}


def of_records(
    records: Sequence[Record], goals: Mapping[str, float], num_failed: int = 0
) -> dict[str, Any]:
    """Return the metrics of a run. Raises ValueError if nothing was answered."""
    if not records:
        raise ValueError("no request was answered")
    seconds = max(r.done for r in records) - min(r.sent for r in records)
    num_tokens, num_events = sum(r.num_tokens for r in records), sum(len(r.events) for r in records)
    spoken = [r for r in records if r.events]
    figures: dict[str, Any] = {
        "s": round(seconds, 4),
        "answered": len(records),
        "failed": num_failed,
        "output_tokens": num_tokens,
        "out_per_s": round(num_tokens / seconds, 1),
        "events_per_s": round(num_events / seconds, 1),
        "event_share": round(num_events / num_tokens, 4) if num_tokens else 0.0,
        **spread("ttft", [r.first() for r in spoken]),
        **spread("itl", [gap for r in spoken for gap in r.gaps()]),
        **spread("tpot", [_per_token(r) for r in spoken if r.num_tokens > 1]),
        **spread("e2e", [r.done - r.sent for r in records]),
        **_prompts(records),
    }
    if goals:
        good = sum(meets(r, goals) for r in records)
        figures |= {
            "good_share": round(good / (len(records) + num_failed), 4),
            "good_per_s": round(good / seconds, 3),
        }
    return figures


def meets(record: Record, goals: Mapping[str, float]) -> bool:
    """Return whether a request met all goals in milliseconds. "itl" is the p99 of the request's gaps."""
    if not record.events:
        return False
    gaps = sorted(record.gaps())
    reached = {
        "ttft": record.first(),
        "itl": percentile(gaps, 99) if gaps else 0.0,
        "tpot": _per_token(record),
        "e2e": record.done - record.sent,
    }
    return all(1e3 * reached[name] <= goal for name, goal in goals.items())


def _per_token(record: Record) -> float:
    """Return the seconds per token after the first."""
    return (record.events[-1] - record.events[0]) / max(1, record.num_tokens - 1)


def _prompts(records: Sequence[Record]) -> dict[str, int]:
    """Return the numbers of computed and cached prompt tokens, if the server reports them."""
    prompts = [r.num_prompt for r in records if r.num_prompt is not None]
    if len(prompts) < len(records):
        return {}
    cached = [r.num_cached for r in records if r.num_cached is not None]
    counts = {"prompt_tokens": sum(prompts)}
    if len(cached) == len(records):
        counts |= {"cached_tokens": sum(cached), "uncached_tokens": sum(prompts) - sum(cached)}
    return counts


def first_turns_apart(records: Sequence[Record]) -> dict[str, Any]:
    """Return first-token times separately for first and later turns of sessions."""
    spoken = [r for r in records if r.events]
    later = [r.first() for r in spoken if r.turn]
    if not later:
        return {}
    return spread("ttft_first_turn", [r.first() for r in spoken if not r.turn]) | spread(
        "ttft_later_turn", later
    )


def over_time(records: Sequence[Record]) -> dict[str, Any]:
    """Return token rates and gaps in equal time bins, and first-token times by send time."""
    begin, end = min(r.sent for r in records), max(r.done for r in records)
    width = max(1e-9, (end - begin) / NUM_BINS)
    counts, gaps = [0] * NUM_BINS, [list[float]() for _ in range(NUM_BINS)]
    for record in records:
        before = None
        for event in record.events:
            index = min(NUM_BINS - 1, int((event - begin) / width))
            counts[index] += 1
            if before is not None:
                gaps[index].append(event - before)
            before = event
    ordered = [sorted(each) for each in gaps]
    spoken = sorted((r for r in records if r.events), key=lambda r: r.sent)
    kept = spoken[:: max(1, -(-len(spoken) // MAX_POINTS))]
    return {
        "bin_s": round(width, 6),
        "events_per_s": [round(count / width, 1) for count in counts],
        "itl_p50_ms": [round(1e3 * percentile(each, 50), 3) if each else None for each in ordered],
        "itl_p99_ms": [round(1e3 * percentile(each, 99), 3) if each else None for each in ordered],
        "ttft": [[round(r.sent - begin, 4), round(1e3 * r.first(), 3)] for r in kept],
    }
