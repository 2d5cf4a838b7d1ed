"""Counters of the engine, and their snapshot in a heartbeat.

Every number is a sum since the start, so a lost or late snapshot does no harm. The step loop only adds
integers and reads a clock; nothing here is called per token.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from tokenspeed_core.api.step import I32, StepPlan
    from tokenspeed_core.kv_cache.manager import KVManager
    from tokenspeed_core.scheduler.sequence import Sequence as GeneratedSequence

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
    """Counts values by bucket. A value belongs to the first bucket whose bound is not smaller."""

    __slots__ = ("_bucket", "_counts", "_total", "_value", "bounds")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0
        # Sequences of one step have the same times, and the search takes half of the time here.
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
    """The engine at one moment. Pages are of the KV cache; all other numbers are sums since the start."""

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


class EngineCounters:
    """The counters of a scheduler and its engine."""

    def __init__(self) -> None:
        self.host_seconds = 0.0  # since the last step was collected
        self._num_prompt_tokens = 0
        self._num_prefill_tokens = 0
        self._num_output_tokens = 0
        self._num_prefix_queries = 0
        self._num_prefix_hits = 0
        self._step = Histogram(STEP_BOUNDS)
        self._host = Histogram(HOST_BOUNDS)
        self._queue = Histogram(REQUEST_BOUNDS)
        self._prefill = Histogram(REQUEST_BOUNDS)
        self._num_draft_rows = 0
        self._num_draft_tokens = 0
        self._num_accepted: list[int] = []

    def admit(
        self, sequence: GeneratedSequence, num_cached: int, *, has_prefix_cache: bool
    ) -> None:
        """Count the first admission of a sequence, with `num_cached` tokens found in the prefix cache."""
        sequence.admitted_at = time.monotonic()
        self._queue.observe(sequence.admitted_at - sequence.arrived_at)
        self._num_prompt_tokens += sequence.num_prompt
        if has_prefix_cache:
            self._num_prefix_queries += sequence.num_prompt
            self._num_prefix_hits += num_cached

    def first_token(self, sequence: GeneratedSequence) -> None:
        """Count the end of a prefill. The prefill after a preemption does not count."""
        if sequence.admitted_at:
            self._prefill.observe(time.monotonic() - sequence.admitted_at)
            sequence.admitted_at = 0.0

    def verify(self, num_drafts: I32, num_accepted: I32) -> None:
        """Count the draft tokens of the rows that had any, and those that were accepted."""
        self._num_draft_rows += len(num_drafts)
        self._num_draft_tokens += int(num_drafts.sum())
        self._num_accepted += [0] * (int(num_drafts.max()) - len(self._num_accepted))
        for position in range(int(num_accepted.max())):
            self._num_accepted[position] += int((num_accepted > position).sum())

    def finish_step(self, plan: StepPlan, num_output_tokens: int, seconds: float) -> None:
        """Count a collected step and the host time since the previous one."""
        self._num_prefill_tokens += len(plan.token_ids)
        self._num_output_tokens += num_output_tokens
        self._step.observe(seconds)
        self._host.observe(self.host_seconds)
        self.host_seconds = 0.0

    def snapshot(self, kv: KVManager, num_preemptions: int) -> EngineStats:
        """Return the counters and the state of the KV cache."""
        pages = kv.counts()
        return EngineStats(
            num_preemptions,
            self._num_prompt_tokens,
            self._num_prefill_tokens,
            self._num_output_tokens,
            self._num_prefix_queries,
            self._num_prefix_hits,
            pages.free,
            pages.cached,
            pages.held,
            pages.pending,
            self._step.snapshot(),
            self._host.snapshot(),
            self._queue.snapshot(),
            self._prefill.snapshot(),
            self._num_draft_rows,
            self._num_draft_tokens,
            tuple(self._num_accepted),
        )
