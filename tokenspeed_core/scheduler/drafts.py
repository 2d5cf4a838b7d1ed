"""Draft tokens of decode rows: their source, and their number per row."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

import numpy as np

from tokenspeed_core.api.drafters import Drafter, Drafts
from tokenspeed_core.api.step import F32, I32
from tokenspeed_core.scheduler.columns import VACANT, SlotColumns
from tokenspeed_core.scheduler.limits import SchedulerLimits
from tokenspeed_core.scheduler.sequence_table import SequenceTable

log = logging.getLogger("tokenspeed.engine")


@dataclass(frozen=True, slots=True)
class NextDraftCount:
    """How many draft tokens the device makes after a step for each row that samples.

    `returns_ids` says whether the host needs to know them.
    """

    num_drafts: int
    returns_ids: bool = False


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A step that was collected: its rows, its query tokens, and how many of these are of prompts.

    `seconds` is the time since the step before was collected. `is_steady` says whether a sequence of such steps takes
    that long for each: if the engine keeps several in flight, those before and after it were in flight with it.
    """

    num_rows: int
    num_tokens: int
    num_chunk_tokens: int
    seconds: float
    is_steady: bool = True


class DraftDepth(Protocol):
    """Chooses how many draft tokens each row gets."""

    def max_drafts(self, num_rows: int) -> int:
        """Return the maximum number of draft tokens of a row in a step with `num_rows` decode rows; 0: none.

        While it is 0, the engine runs as it does without a drafter.
        """

    def max_seconds(self, num_rows: int) -> float:
        """Return how long the drafter may take to begin sequences before a step with `num_rows` decode rows."""

    def spend(self, seconds: float) -> None:
        """Learn that the drafter took this long at the end of a sequence."""

    def choose(
        self, slots: I32, counts: I32, probabilities: F32 | None, num_rows: int, num_left: int
    ) -> I32:
        """Return how many of the `counts` proposed tokens of each row to verify, `num_left` in all at most.

        `probabilities` are those of `Drafts`. The step has `num_rows` decode rows.
        """

    def begin(self, slot: int) -> None:
        """Discard the observations of a slot: another sequence has it."""

    def observe(self, slots: I32, num_drafts: I32, num_accepted: I32) -> None:
        """Learn how many draft tokens of some rows the model accepted."""

    def finish_step(self, step: FinishedStep) -> None:
        """Learn the duration of a step."""


class DraftSource(ABC):
    """Gives decode rows draft tokens. The depth decides how many.

    `has_model` says whether a draft model may follow steps: otherwise `next_drafts` is not called.
    """

    has_model = False

    def __init__(self, depth: DraftDepth, limits: SchedulerLimits, columns: SlotColumns) -> None:
        """Start without draft tokens."""
        self._depth = depth
        self._limits = limits
        self._columns = columns
        self._ids = np.zeros((limits.max_num_seqs, limits.max_drafts), np.int32)

    @property
    @abstractmethod
    def needs_results(self) -> bool:
        """Whether all steps in flight must be collected before the next one is planned."""

    @abstractmethod
    def count(self, slots: I32, room: I32) -> I32 | None:
        """Return the number of draft tokens of each decode row, at most `room`; None: no row has any."""

    def take(self, slots: I32, counts: I32) -> I32 | None:
        """Return the first `counts[i]` draft tokens of each row, concatenated; None: the device has them."""
        ids: I32 = self._ids[slots][np.arange(self._limits.max_drafts) < counts[:, None]]
        return ids

    def next_drafts(
        self, slots: I32, num_chunk_tokens: int, *, is_useful: bool = True
    ) -> NextDraftCount | None:
        """Return how many draft tokens the device makes after a step for each row that samples, which are `slots`.

        The step has `num_chunk_tokens` tokens of prompts. Draft tokens that are not useful would probably not be
        verified. None: no draft model follows the step.
        """
        return None

    def receive(self, slots: I32, token_ids: I32) -> None:
        """Keep the draft tokens that the device made in the newest step for some slots, [S, num_drafts]."""
        raise AssertionError("only a draft model returns draft tokens")

    def observe(self, slots: I32, num_drafts: I32, num_accepted: I32) -> None:
        """Learn how many draft tokens of some rows the model accepted."""
        self._depth.observe(slots, num_drafts, num_accepted)

    def finish_step(self, step: FinishedStep) -> None:
        """Learn the duration of a step."""
        self._depth.finish_step(step)

    @abstractmethod
    def end(self, slot: int) -> None:
        """Discard the state of the sequence in a slot, which becomes free."""

    def _num_left(self, num_rows: int) -> int:
        """Return the draft tokens that a step of decodes may have."""
        limits = self._limits
        return min(limits.max_draft_tokens, max(0, limits.token_budget - num_rows))


class HostDrafts(DraftSource):
    """Draft tokens of a drafter that runs on the host, for rows with all tokens known to the host.

    If the drafter fails, no row gets draft tokens from then on.
    """

    def __init__(
        self,
        drafter: Drafter,
        name: str,
        depth: DraftDepth,
        limits: SchedulerLimits,
        columns: SlotColumns,
        sequences: SequenceTable,
    ) -> None:
        """`name` is for the log. The drafter sees sequences once they decode."""
        super().__init__(depth, limits, columns)
        self._drafter = drafter
        self._name = name
        self._sequences = sequences
        self._is_off = False
        # The sequence that the drafter follows in each slot, and how many of its tokens it has seen.
        self._sequence_id = np.full(limits.max_num_seqs, VACANT, np.int64)
        self._num_seen = np.zeros(limits.max_num_seqs, np.int32)

    @property
    def needs_results(self) -> bool:
        """Whether a decoding row may draft: its newest tokens must be known."""
        slots = self._columns.decoding()
        is_on = not self._is_off and self._depth.max_drafts(len(slots))
        return bool(is_on and self._columns.may_draft[slots].any())

    def count(self, slots: I32, room: I32) -> I32 | None:
        """Let the drafter propose tokens, and return their number for each row.

        While the depth allows none, the drafter is not called. It gets the tokens of that time with the next call.
        """
        if self._is_off or not len(slots):
            return None
        max_drafts = self._depth.max_drafts(len(slots))
        if not max_drafts:
            return None
        columns = self._columns
        is_ready = columns.may_draft[slots] & (columns.num_known[slots] == columns.num_bound[slots])
        most = np.minimum(room, np.int32(max_drafts))
        try:
            self._begin(slots[is_ready], self._depth.max_seconds(len(slots)))
            is_ready &= self._sequence_id[slots] != VACANT
            self._follow(slots[is_ready])
            places = np.flatnonzero(is_ready & (most > 0))
            if not len(places):
                return None
            most = most[places].astype(np.int32)
            drafts = self._drafter.propose(slots[places], most)
            self._check(drafts, most)
        except Exception:  # plugin code may raise anything
            self._switch_off()
            return None
        counts = np.zeros(len(slots), np.int32)
        counts[places] = drafts.counts
        has_token = np.arange(self._limits.max_drafts) < counts[:, None]
        ids = np.zeros(has_token.shape, np.int32)
        ids[has_token] = drafts.token_ids
        self._ids[slots] = ids
        counts[places] = self._depth.choose(
            slots[places],
            drafts.counts,
            drafts.probabilities,
            len(slots),
            self._num_left(len(slots)),
        )
        return counts

    def end(self, slot: int) -> None:
        """Give the drafter the last tokens of the sequence in a slot, and end it there."""
        if self._is_off or self._sequence_id[slot] == VACANT:
            return
        started_at = perf_counter()
        try:
            self._follow(np.asarray([slot], np.int32))
            self._drafter.end(slot)
        except Exception:  # plugin code may raise anything
            self._switch_off()
        self._sequence_id[slot] = VACANT
        self._depth.spend(perf_counter() - started_at)

    def _begin(self, slots: I32, max_seconds: float) -> None:
        """Begin the new sequences of some slots until the time is over, at least one."""
        columns, started_at = self._columns, perf_counter()
        for slot in slots[self._sequence_id[slots] == VACANT].tolist():
            sequence, known = self._sequences.at(slot).sequence, columns.known(slot)
            self._depth.begin(slot)
            tenant = sequence.request.cache_namespace
            self._drafter.begin(slot, known.copy(), sequence.num_prompt, tenant)
            self._sequence_id[slot] = sequence.sequence_id
            self._num_seen[slot] = len(known)
            if perf_counter() - started_at > max_seconds:
                return

    def _follow(self, slots: I32) -> None:
        """Give the drafter the new tokens of the sequences in some slots."""
        columns = self._columns
        counts = columns.num_known[slots] - self._num_seen[slots]
        slots, counts = slots[counts > 0], counts[counts > 0]
        if len(slots):
            parts = [
                columns.tokens[slot, end - count : end]
                for slot, count, end in zip(
                    slots.tolist(), counts.tolist(), columns.num_known[slots].tolist(), strict=True
                )
            ]
            self._drafter.extend(slots, counts, np.concatenate(parts))
            self._num_seen[slots] += counts

    def _check(self, drafts: Drafts, most: I32) -> None:
        """Raise ValueError if proposals are invalid."""
        counts, ids = drafts.counts, drafts.token_ids
        if len(counts) != len(most) or ((counts < 0) | (counts > most)).any():
            raise ValueError(f"counts are {counts.tolist()}; at most {most.tolist()} are allowed")
        if len(ids) != int(counts.sum()):
            raise ValueError(f"{len(ids)} tokens, but the sum of counts is {counts.sum()}")
        if drafts.probabilities is not None and len(drafts.probabilities) != len(ids):
            raise ValueError(f"{len(drafts.probabilities)} probabilities, but {len(ids)} tokens")
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self._limits.vocab_size:
            raise ValueError(
                f"token ids {ids.tolist()}: allowed are 0..{self._limits.vocab_size - 1}"
            )

    def _switch_off(self) -> None:
        self._is_off = True
        log.exception("%s failed; speculative decoding is off from now on", self._name)
