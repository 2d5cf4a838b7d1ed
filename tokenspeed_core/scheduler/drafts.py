"""Draft tokens of decode rows: their source, and their number per row."""

from __future__ import annotations

import logging
import operator
from abc import ABC, abstractmethod
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple, Protocol

import numpy as np

from tokenspeed_core.api.drafters import Drafter, Drafts
from tokenspeed_core.api.step import F32, I32, I64, StepPlan
from tokenspeed_core.scheduler.columns import VACANT, SlotColumns
from tokenspeed_core.scheduler.limits import SchedulerLimits
from tokenspeed_core.scheduler.sequence_table import SequenceTable

log = logging.getLogger("tokenspeed.engine")

_NUM_ENDS = 8  # the mean time to end a sequence covers about as many


@dataclass(frozen=True, slots=True)
class NextDraftCount:
    """How many draft tokens the device makes after a step for each row that samples.

    `returns_ids` says whether the host needs to know them.
    """

    num_drafts: int
    returns_ids: bool = False


class FinishedStep(NamedTuple):
    """A collected step: its rows, its query tokens, and how many of these are prompt and accepted draft tokens.

    Draft tokens count as accepted if their sequence keeps them. `seconds` is the time since the step before was
    collected. `is_steady` says whether it is typical of successive steps: if the engine keeps several in flight, the
    steps before and after it were in flight with it. `is_followed` says whether a draft model ran after it.
    `mean_context` is the number of tokens before its chunks, on average of their tokens.
    """

    num_rows: int
    num_tokens: int
    num_chunk_tokens: int
    num_accepted: int
    seconds: float
    is_steady: bool = True
    is_followed: bool = False
    mean_context: int = 0

    @classmethod
    def of(
        cls, plan: StepPlan, kept: I32 | None, seconds: float, *, is_steady: bool
    ) -> FinishedStep:
        """Describe a step. `kept` [num_decodes] are the new tokens that each sequence keeps; None: no draft tokens."""
        num_accepted = 0
        if kept is not None:
            num_accepted = sum([each - 1 for each in kept.tolist() if each])
        num_chunk_tokens = len(plan.token_ids)
        return cls(
            plan.num_rows,
            plan.num_decodes + plan.num_draft_tokens + num_chunk_tokens,  # without a sum over rows
            num_chunk_tokens,
            num_accepted,
            seconds,
            is_steady,
            is_followed=plan.next_drafts is not None,
            mean_context=_mean_context(plan),
        )


def _mean_context(plan: StepPlan) -> int:
    """Return the number of tokens before the chunks of a step, on average of their tokens; 0 without chunks."""
    num_tokens = len(plan.token_ids)
    if not num_tokens:
        return 0
    chunks = plan.num_query_tokens[plan.num_decodes :].astype(np.int64)
    return int(chunks @ plan.num_computed_tokens[plan.num_decodes :]) // num_tokens


@dataclass(frozen=True, slots=True, eq=False)
class Proposed:
    """The tokens that a drafter proposed for the next step: `counts[i]` for `slots[i]`, concatenated."""

    slots: I64
    counts: I32
    token_ids: I32

    def has_exactly(self, slots: I64, counts: I32) -> bool:
        """Return whether these slots take all proposed tokens, in the same order."""
        is_equal = counts.tobytes() == self.counts.tobytes()
        return is_equal and slots.tobytes() == self.slots.tobytes()

    def table(self, width: int) -> I32:
        """Return the tokens as rows of this width, padded with 0."""
        has_token = np.arange(width) < self.counts[:, np.newaxis]
        ids = np.zeros(has_token.shape, np.int32)
        ids[has_token] = self.token_ids
        return ids


class DraftDepth(Protocol):
    """Chooses how many draft tokens each row gets."""

    @property
    def is_paused(self) -> bool:
        """Whether no step gets draft tokens for now, however many rows it has."""

    @property
    def budget(self) -> float:
        """The time that draft tokens may still lose, in steps without them; negative: the loss beyond it."""

    def follows_prompts(self, num_tokens: int) -> bool:
        """Return whether a draft model runs after a step with prompts.

        The longest of these has `num_tokens` tokens in all its chunks.
        """

    def max_drafts(self, num_rows: int) -> int:
        """Return the maximum number of draft tokens of a row in a step with `num_rows` decode rows; 0: none.

        While it is 0, the engine runs as it does without a drafter.
        """

    def max_seconds(self, num_rows: int) -> float:
        """Return how long the drafter may still take to begin sequences before a step with `num_rows` decode rows.

        If the result is not positive, none begins.
        """

    def spend(self, seconds: float) -> None:
        """Record the drafter's time to begin or end sequences. The step that finishes next includes it."""

    def are_worth_waiting(
        self, slots: I64, counts: I32, probabilities: F32 | None, num_rows: int, num_left: int
    ) -> bool:
        """Return whether a step would verify any of the proposed tokens if steps in flight were collected for it.

        The arguments are those of `choose`.
        """

    def choose(
        self, slots: I64, counts: I32, probabilities: F32 | None, num_rows: int, num_left: int
    ) -> I32:
        """Return how many of the `counts` proposed tokens of each row to verify, `num_left` in all at most.

        `probabilities` are those of `Drafts`. The step has `num_rows` decode rows.
        """

    def begin(self, slot: int) -> None:
        """Discard the observations of a slot: another sequence has it."""

    def observe(self, slots: I64, num_drafts: I32, num_accepted: I32) -> None:
        """Learn how many draft tokens of some rows the model accepted in the step that finished last.

        `choose` may have been called for the next step already.
        """

    @property
    def num_unmeasured(self) -> int:
        """How many of the next plain steps need no `finish_step`, because their durations do not matter.

        In a plain step, all rows are decodes without draft tokens. Without a draft model, the steps with prompts among
        them need none either. `finish_step` and `spend` change the number.
        """

    def pass_steps(self, num_steps: int) -> None:
        """Record plain steps of a pause, at most `num_unmeasured`."""

    def finish_step(self, step: FinishedStep) -> None:
        """Learn the duration of a step, before its tokens are observed and its last sequences end."""


class DraftSource(ABC):
    """Gives decode rows draft tokens. The depth decides how many.

    `has_model` says whether a draft model may run after steps. If not, `next_drafts` is not called. While the source
    `is_idle`, it is called for steps with prompts only.
    """

    has_model = False

    def __init__(self, depth: DraftDepth, limits: SchedulerLimits, columns: SlotColumns) -> None:
        """Start without draft tokens."""
        self._depth = depth
        self._limits = limits
        self._columns = columns
        self._ids = np.zeros((limits.max_num_seqs, limits.max_drafts), np.int32)

    @property
    def is_on(self) -> bool:
        """Whether decode rows may get draft tokens now."""
        return self._depth.max_drafts(len(self._columns.decoding())) > 0

    @property
    def is_paused(self) -> bool:
        """Whether no step gets draft tokens for now, however many rows it has."""
        return self._depth.is_paused

    @property
    def budget(self) -> float:
        """The budget of `DraftDepth`."""
        return self._depth.budget

    @property
    def is_idle(self) -> bool:
        """Whether drafting is paused, and no row has draft tokens left."""
        return False

    @abstractmethod
    def wants_results(self) -> bool:
        """Return whether to collect all steps in flight before the next one is planned. Called while drafts are on."""

    @abstractmethod
    def count(self, slots: I64, room: I32) -> I32 | None:
        """Return the number of draft tokens of each decode row, at most `room`; None: no row has any."""

    def take(self, slots: I64, counts: I32) -> I32 | None:
        """Return the first `counts[i]` draft tokens of each row, concatenated; None: the device has them."""
        ids: I32 = self._ids[slots][np.arange(self._limits.max_drafts) < counts[:, None]]
        return ids

    def next_drafts(
        self, slots: I64, chunk_slots: I64, *, is_useful: bool = True
    ) -> NextDraftCount | None:
        """Return how many draft tokens the device makes after a step for each row that samples, which are `slots`.

        The step computes prompt tokens of `chunk_slots`. Unless `is_useful`, the next step would probably not verify draft
        tokens. None: no draft model runs after the step.
        """
        return None

    def receive(self, slots: I64, token_ids: I32) -> None:
        """Keep the draft tokens that the device made in the newest step for some slots, [S, num_drafts]."""
        raise AssertionError("only a draft model returns draft tokens")

    def observe(self, slots: I64, num_drafts: I32, num_accepted: I32) -> None:
        """Learn how many draft tokens of some rows the model accepted."""
        self._depth.observe(slots, num_drafts, num_accepted)

    @property
    def num_unmeasured(self) -> int:
        """How many of the next plain steps need no `finish_step`; see `DraftDepth`."""
        return self._depth.num_unmeasured

    def pass_steps(self, num_steps: int) -> None:
        """Record plain steps of a pause, at most `num_unmeasured`."""
        self._depth.pass_steps(num_steps)

    def finish_step(self, step: FinishedStep) -> None:
        """Learn the duration of a step, before its result is applied."""
        self._depth.finish_step(step)

    @abstractmethod
    def end(self, slot: int) -> None:
        """Discard the state of the sequence in a slot, which becomes free."""

    def _num_left(self, num_rows: int) -> int:
        """Return the draft tokens that a step of decodes may have."""
        limits = self._limits
        return min(limits.max_draft_tokens, max(0, limits.token_budget - num_rows))


class HostDrafts(DraftSource):
    """Draft tokens of a drafter that runs on the host.

    Before a step, `wants_results` may let the drafter propose tokens while others are in flight. These proposals are
    dropped. `count` lets it propose the tokens that the step verifies, once all earlier tokens are known.

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
        self._end_seconds = 0.0  # of the drafter to end a sequence, a running mean
        nothing = np.zeros(0, np.int32)
        self._proposed = Proposed(nothing.astype(np.int64), nothing, nothing)

    @property
    def is_on(self) -> bool:
        """Whether the drafter works, and drafts are not paused."""
        return not self._is_off and self._depth.max_drafts(len(self._columns.decoding())) > 0

    @property
    def is_paused(self) -> bool:
        """Whether the drafter failed, or drafts are paused."""
        return self._is_off or self._depth.is_paused

    def wants_results(self) -> bool:
        """Return whether any row would get draft tokens, as far as the collected tokens show.

        The drafter proposes continuations without the tokens of the steps in flight. If none is worth a wait for these,
        the next step is a plain one, and overlaps with them.
        """
        columns = self._columns
        slots = columns.decoding()
        num_rows = len(slots)
        room = columns.max_len[slots] - columns.num_bound[slots] - 1
        most = np.minimum(room, np.int32(self._depth.max_drafts(num_rows)))
        most *= columns.may_draft[slots]
        if not np.count_nonzero(most > 0):
            return False
        found = self._propose(slots, most)
        if found is None:
            return False
        drafting, _, drafts = found
        num_left = self._num_left(num_rows)
        return self._depth.are_worth_waiting(
            drafting, drafts.counts, drafts.probabilities, num_rows, num_left
        )

    def count(self, slots: I64, room: I32) -> I32 | None:
        """Let the drafter propose tokens, and return their number for each row.

        While drafting is paused, the drafter is not called. The next call gives it the tokens of the pause.
        """
        num_rows = len(slots)
        if self._is_off or not num_rows:
            return None
        max_drafts = self._depth.max_drafts(num_rows)
        if not max_drafts:
            return None
        found = self._propose(slots, np.minimum(room, np.int32(max_drafts)))
        if found is None:
            return None
        drafting, places, drafts = found
        # Copies: the drafter may reuse its arrays while the plan is in flight, and they may have another type.
        counts, token_ids = np.array(drafts.counts, np.int32), np.array(drafts.token_ids, np.int32)
        self._proposed = Proposed(drafting, counts, token_ids)
        num_left = self._num_left(num_rows)
        chosen = self._depth.choose(drafting, counts, drafts.probabilities, num_rows, num_left)
        if places is None:
            return chosen
        of_rows = np.zeros(num_rows, np.int32)
        of_rows[places] = chosen
        return of_rows

    def take(self, slots: I64, counts: I32) -> I32:
        """Return the first `counts[i]` draft tokens of each row, concatenated."""
        proposed = self._proposed
        if proposed.has_exactly(slots, counts):
            return proposed.token_ids
        self._ids[proposed.slots] = proposed.table(self._ids.shape[1])
        found = super().take(slots, counts)
        assert found is not None, "the host has the draft tokens"
        return found

    def end(self, slot: int) -> None:
        """Give the drafter the last tokens of the sequence in a slot, and end it there."""
        if self._is_off or self._sequence_id[slot] == VACANT:
            return
        started_at = perf_counter()
        try:
            self._follow(np.asarray([slot], np.int64))
            self._drafter.end(slot)
        except Exception:  # plugin code may raise anything
            self._switch_off()
        self._sequence_id[slot] = VACANT
        seconds = perf_counter() - started_at
        self._end_seconds += (seconds - self._end_seconds) / _NUM_ENDS
        self._depth.spend(seconds)

    def _propose(self, slots: I64, most: I32) -> tuple[I64, I64 | None, Drafts] | None:
        """Let the drafter propose at most `most[i]` tokens for each decode row; None if no row can draft.

        Returns the slots that it proposed for, their places in `slots` (None: all), and the proposals.
        """
        drafting, places = slots, None
        try:
            # Built-in functions are faster than NumPy on short lists.
            if VACANT in self._sequence_id[slots].tolist() or min(most.tolist()) < 1:
                self._begin(slots, len(slots))
                is_ready = (self._sequence_id[slots] != VACANT) & (most > 0)
                places = is_ready.nonzero()[0]
                if not len(places):
                    return None
                drafting, most = slots[places], most[places]
            self._follow(drafting)
            drafts = self._drafter.propose(drafting.astype(np.int32), most)
            self._check(drafts, most)
        except Exception:  # plugin code may raise anything
            self._switch_off()
            return None
        return drafting, places, drafts

    def _begin(self, slots: I64, num_rows: int) -> None:
        """Begin new sequences of some slots that have a generated token, until the time limit.

        The limit includes the time to end them, and to end those that the drafter follows already.
        """
        new = slots[(self._sequence_id[slots] == VACANT) & self._columns.may_draft[slots]]
        columns, started_at = self._columns, perf_counter()
        num_ends = np.count_nonzero(self._sequence_id != VACANT)
        max_seconds, seconds = self._depth.max_seconds(num_rows), 0.0
        for slot in new.tolist():
            if seconds + num_ends * self._end_seconds >= max_seconds:
                break
            sequence, known = self._sequences.at(slot).sequence, columns.known(slot)
            if len(known) == sequence.num_prompt:
                continue  # its first token is in flight
            self._depth.begin(slot)
            tenant = sequence.request.cache_namespace
            self._drafter.begin(slot, known.copy(), sequence.num_prompt, tenant)
            self._sequence_id[slot] = sequence.sequence_id
            self._num_seen[slot] = len(known)
            num_ends += 1
            seconds = perf_counter() - started_at
        self._depth.spend(seconds)

    def _follow(self, slots: I64) -> None:
        """Give the drafter the new tokens of the sequences in some slots."""
        columns = self._columns
        ends = columns.num_known[slots]
        counts = ends - self._num_seen[slots]
        if 0 in counts.tolist():
            has_new = counts > 0
            slots, ends, counts = slots[has_new], ends[has_new], counts[has_new]
        if len(slots):
            parts = [
                columns.tokens[slot, end - count : end]
                for slot, count, end in zip(
                    slots.tolist(), counts.tolist(), ends.tolist(), strict=True
                )
            ]
            token_ids = parts[0] if len(parts) == 1 else np.concatenate(parts)
            self._drafter.extend(slots.astype(np.int32), counts, token_ids)
            self._num_seen[slots] = ends

    def _check(self, drafts: Drafts, most: I32) -> None:
        """Raise ValueError if proposals are invalid."""
        counts, ids = drafts.counts.tolist(), drafts.token_ids.tolist()
        num_ids, vocab_size = len(ids), self._limits.vocab_size
        if (
            len(counts) != len(most)
            or min(counts) < 0
            or any(map(operator.gt, counts, most.tolist()))
        ):
            raise ValueError(f"counts are {counts}; at most {most.tolist()} are allowed")
        if num_ids != sum(counts):
            raise ValueError(f"{num_ids} tokens, but the sum of counts is {sum(counts)}")
        if drafts.probabilities is not None and len(drafts.probabilities) != num_ids:
            raise ValueError(f"{len(drafts.probabilities)} probabilities, but {num_ids} tokens")
        if num_ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            raise ValueError(f"token ids {ids}: allowed are 0..{vocab_size - 1}")

    def _switch_off(self) -> None:
        self._is_off = True
        log.exception("%s failed; speculative decoding is off from now on", self._name)
