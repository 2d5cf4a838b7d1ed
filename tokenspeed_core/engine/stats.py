"""Histograms, and the statistics of an engine in its heartbeats.

Every number is a sum since the start, so a lost or late heartbeat does no harm.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import msgspec

# Upper bounds of the buckets, in seconds.
STEP_BOUNDS = (
    *(0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.0125, 0.015, 0.02, 0.025),
    *(0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0),
)
HOST_BOUNDS = (
    *(0.00005, 0.0001, 0.0002, 0.0003, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.01),
    *(0.02, 0.05, 0.1, 0.5),
)
REQUEST_BOUNDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0),
    *(1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0),
)


class HistogramCounts(msgspec.Struct, frozen=True, array_like=True):
    """The number of values in each bucket of a histogram, the last without an upper bound, and their sum."""

    counts: tuple[int, ...]
    total: float


class Histogram:
    """Counts values by bucket. A value is counted in the first bucket with a bound that is not smaller."""

    __slots__ = ("_bucket", "_counts", "_total", "_value", "bounds")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0
        # The last value and its bucket: sequences of a step have equal times, and the search is half of the cost.
        self._value, self._bucket = 0.0, 0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value."""
        if value != self._value:
            self._value, self._bucket = value, bisect_left(self.bounds, value)
        self._counts[self._bucket] += times
        self._total += value * times

    def snapshot(self) -> HistogramCounts:
        """Return the counts so far."""
        return HistogramCounts(tuple(self._counts), self._total)


class EngineStats(msgspec.Struct, frozen=True, array_like=True):
    """The engine at one moment. Pages are of the KV cache; all other numbers but the last three are sums since the start."""

    num_preemptions: int
    num_prompt_tokens: int  # of admitted sequences, cached ones included
    num_prefill_tokens: int  # computed tokens of prompts and of preempted sequences
    num_output_tokens: int
    num_prefix_queries: int  # prompt tokens looked up in the prefix cache
    num_prefix_hits: int  # of them, tokens found
    num_free_pages: int
    num_cached_pages: int
    num_held_pages: int
    num_pending_pages: int
    step: HistogramCounts  # seconds of a step, with bounds STEP_BOUNDS
    host: HistogramCounts  # seconds of a step's planning and bookkeeping, HOST_BOUNDS
    queue: HistogramCounts  # seconds from a sequence's arrival to its admission, REQUEST_BOUNDS
    prefill: HistogramCounts  # seconds from there to its first token, REQUEST_BOUNDS
    num_draft_rows: int = 0  # decodes with draft tokens
    num_draft_tokens: int = 0  # of them
    num_accepted: tuple[
        int, ...
    ] = ()  # how often the first draft token of a row was accepted, the second, …
    num_drafted: tuple[int, ...] = ()  # how often a row had a first draft token, a second, …
    # The average of the rows with draft tokens in the latest step that had any; 0: paused.
    drafts_per_row: float = 0.0
    is_draft_paused: bool = False
    draft_budget: float = 0.0  # time that drafts may still lose, in steps without drafts

    @property
    def num_saved_steps(self) -> int:
        """Decodes that draft tokens have saved: accepted draft tokens."""
        return sum(self.num_accepted)

    @property
    def num_pages(self) -> int:
        """Size of the KV cache in pages."""
        return (
            self.num_free_pages
            + self.num_cached_pages
            + self.num_held_pages
            + self.num_pending_pages
        )

    @property
    def kv_usage(self) -> float:
        """Share of the pages that cannot be reused now, from 0 to 1."""
        return (self.num_held_pages + self.num_pending_pages) / max(1, self.num_pages)
