"""Counters of the scheduler and its engine.

The step loop only adds integers and reads a clock; nothing here is called per token.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as ListLike
from itertools import accumulate

import numpy as np

from tokenspeed_core.api.step import I32, StepPlan
from tokenspeed_core.engine.stats import (
    HOST_BOUNDS,
    REQUEST_BOUNDS,
    STEP_BOUNDS,
    EngineStats,
    Histogram,
)
from tokenspeed_core.kv_cache.manager import KVManager
from tokenspeed_core.scheduler.drafts import DraftSource
from tokenspeed_core.scheduler.sequence import Sequence


class EngineCounters:
    """The counters of a scheduler and its engine."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Count from zero."""
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
        # Rows with draft tokens: by the number of these, and by how many of them were accepted.
        self._num_drafted = [0]
        self._num_rows = [0]
        self._last_drafts = np.zeros(0, np.int32)  # of the rows that had any in the newest step

    def admit(self, sequence: Sequence, num_cached: int, *, has_prefix_cache: bool) -> None:
        """Count the first admission of a sequence, with `num_cached` tokens found in the prefix cache."""
        sequence.admitted_at = time.monotonic()
        self._queue.observe(sequence.admitted_at - sequence.arrived_at)
        self._num_prompt_tokens += sequence.num_prompt
        if has_prefix_cache:
            self._num_prefix_queries += sequence.num_prompt
            self._num_prefix_hits += num_cached

    def first_token(self, sequence: Sequence) -> None:
        """Count the end of a prefill. The prefill after a preemption does not count."""
        if sequence.admitted_at:
            self._prefill.observe(time.monotonic() - sequence.admitted_at)
            sequence.admitted_at = 0.0

    def verify(self, num_drafts: I32, num_accepted: I32) -> None:
        """Count the draft tokens of the rows that had any, and those that were accepted."""
        counts = num_drafts.tolist()
        num_missing = max(counts) + 1 - len(self._num_rows)
        if num_missing > 0:
            self._num_drafted += [0] * num_missing
            self._num_rows += [0] * num_missing
        for drafted, accepted in zip(counts, num_accepted.tolist(), strict=True):
            self._num_drafted[drafted] += 1
            self._num_rows[accepted] += 1
        self._last_drafts = num_drafts

    def finish_step(self, plan: StepPlan, num_output_tokens: int, seconds: float) -> None:
        """Count a collected step and the host time since the previous one."""
        self._num_prefill_tokens += len(plan.token_ids)
        self._num_output_tokens += num_output_tokens
        self._step.observe(seconds)
        self._host.observe(self.host_seconds)
        self.host_seconds = 0.0

    def snapshot(
        self, kv: KVManager, num_preemptions: int, drafts: DraftSource | None = None
    ) -> EngineStats:
        """Return the counters, and the state of the KV cache and of drafting."""
        pages = kv.counts()
        num_drafted, num_accepted = _at_least(self._num_drafted), _at_least(self._num_rows)
        is_paused = drafts is not None and drafts.is_paused
        drafts_per_row = 0.0
        if len(self._last_drafts) and not is_paused:
            drafts_per_row = float(self._last_drafts.mean())
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
            sum(self._num_rows),
            sum(num_drafted),
            num_accepted,
            num_drafted,
            drafts_per_row,
            is_paused,
            0.0 if drafts is None else drafts.budget,
        )


def _at_least(num_rows: ListLike[int]) -> tuple[int, ...]:
    """Return how many rows have at least 1, 2, … tokens, from the numbers of rows with 0, 1, 2, …"""
    return tuple(accumulate(num_rows[:0:-1]))[::-1]
