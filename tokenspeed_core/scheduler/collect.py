"""From a step's result to columns of tokens: who got what, who is done, and why. Vectorised over rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from msgspec.structs import replace

from tokenspeed_core.api.sampling import FinishReason
from tokenspeed_core.api.step import I32, I64, StepLogprobs, StepResult
from tokenspeed_core.engine.messages import Outputs
from tokenspeed_core.scheduler.columns import SlotColumns
from tokenspeed_core.scheduler.step_plan_builder import InFlight


@dataclass(slots=True, eq=False)
class Collected:
    """One step's tokens for the sequences that still hold their slot, as columns of N."""

    plan_rows: I32  # the plan's row of each
    slots: I32
    sequence_ids: I64
    num_tokens: I32
    token_ids: I32
    finish: I32
    num_cached: I32
    result: StepResult
    _late: list[tuple[list[int], ...]] = field(
        default_factory=list
    )  # of each late token, what the columns get

    def ended(self) -> Iterator[tuple[int, FinishReason]]:
        """Yield (slot, reason) of the sequences that are over."""
        for i in np.flatnonzero(self.finish):
            yield int(self.slots[i]), FinishReason(int(self.finish[i]))

    def due_for_naming(self, columns: SlotColumns, granularity: int) -> I32:
        """Return the slots that go on and have filled what one hash covers since their last naming."""
        slots = self.slots[self.finish == FinishReason.NOT] if self.finish.any() else self.slots
        return slots[columns.num_known[slots] - 1 - columns.num_hashed_tokens[slots] >= granularity]

    def homeless(self) -> Iterator[tuple[int, I32]]:
        """Yield (plan row, tokens) of the rows whose sequence no longer holds its slot."""
        counts = self.result.num_tokens
        if len(self.slots) == len(counts):
            return
        starts = np.cumsum(counts) - counts
        kept = set(self.plan_rows.tolist())
        for row in np.flatnonzero(counts):
            if int(row) not in kept:
                start = int(starts[row])
                yield int(row), self.result.token_ids[start : start + int(counts[row])]

    def add_late(
        self, row: int, sequence_id: int, token: int, finish: FinishReason, num_cached: int
    ) -> None:
        """Add a token of a sequence that lost its slot; a negative one is none, and only its end is told."""
        tokens = [] if token < 0 else [token]
        self._late.append(([row], [sequence_id], [len(tokens)], tokens, [finish], [num_cached]))

    def outputs(self) -> Outputs:
        """Return the message for the API worker."""
        columns: list[np.ndarray[Any, Any]] = [
            self.plan_rows,
            self.sequence_ids,
            self.num_tokens,
            self.token_ids,
            self.finish,
            self.num_cached,
        ]
        if self._late:  # an empty list counts as one of floats, hence the casting
            columns = [
                np.concatenate(parts, dtype=parts[0].dtype, casting="unsafe")
                for parts in zip(columns, *self._late, strict=True)
            ]
        plan_rows, sequence_ids, num_tokens, token_ids, finish, num_cached = columns
        outputs = Outputs(sequence_ids, num_tokens, token_ids, finish, num_cached)
        if self.result.logprobs is None:
            return outputs
        return replace(outputs, logprobs=_kept(self.result.logprobs, outputs, plan_rows))


def collect(columns: SlotColumns, flight: InFlight, result: StepResult) -> Collected:
    """Write a result's tokens into the columns and find the sequences that end.

    Rows of sequences that lost their slot since are left out; what a sequence got past its end is dropped.
    """
    plan, counts = flight.plan, result.num_tokens
    holds = (columns.sequence_id[plan.slots] == flight.sequence_ids) & (flight.num_new > 0)
    got = np.flatnonzero(holds).astype(np.int32)
    slots = plan.slots[got]
    num_tokens = counts[got]
    columns.num_bound[slots] -= flight.num_new[got] - num_tokens
    if len(got) == len(counts) and len(result.token_ids) == len(got):
        token_ids, row_of = result.token_ids, np.arange(len(got))
    else:
        starts = (np.cumsum(counts) - counts)[got]
        row_of = np.repeat(np.arange(len(got)), num_tokens)
        token_ids = result.token_ids[
            np.repeat(starts, num_tokens) + _offsets(num_tokens, len(row_of))
        ]
    finish = np.zeros(len(got), np.int32)
    num_tokens, token_ids, row_of = _cut(columns, slots, num_tokens, token_ids, row_of, finish)
    columns.tokens[
        slots[row_of], columns.num_known[slots][row_of] + _offsets(num_tokens, len(row_of))
    ] = token_ids
    columns.num_known[slots] += num_tokens
    num_cached = columns.num_cached[slots]
    columns.num_cached[slots[num_tokens > 0]] = 0
    return Collected(
        got, slots, flight.sequence_ids[got], num_tokens, token_ids, finish, num_cached, result
    )


def _cut(
    columns: SlotColumns,
    slots: I32,
    num_tokens: I32,
    token_ids: I32,
    row_of: I64,
    finish: I32,
) -> tuple[I32, I32, I64]:
    """Mark the rows that end, and drop what came past the end. Writes `finish`."""
    room = columns.max_len[slots] - columns.num_known[slots]
    finish[num_tokens >= room] = FinishReason.LENGTH
    kept = np.minimum(num_tokens, room)
    stops = (token_ids[:, None] == columns.stop_ids[slots][row_of]).any(axis=1) | (token_ids < 0)
    if stops.any():
        position = _offsets(num_tokens, len(row_of))
        for at in np.flatnonzero(
            stops
        ):  # the first of a row is seen first; the rest lies behind its end
            row = row_of[at]
            if position[at] < kept[row]:
                failed = token_ids[at] < 0  # no finite logit: the sequence cannot go on
                kept[row] = position[at] + (0 if failed else 1)
                finish[row] = FinishReason.ERROR if failed else FinishReason.STOP
    if (kept == num_tokens).all():
        return num_tokens, token_ids, row_of
    keep = _offsets(num_tokens, len(row_of)) < kept[row_of]
    return kept.astype(np.int32), token_ids[keep], row_of[keep]


def _offsets(counts: I32, total: int) -> I64:
    """Return 0, 1, ... within each run of `counts`, which are `total` together."""
    if total == len(counts) and counts.all():  # one each
        return np.zeros(total, np.int64)
    ends = np.cumsum(counts, dtype=np.int64)
    return np.arange(total) - np.repeat(ends - counts, counts)


def _kept(logprobs: StepLogprobs, outputs: Outputs, plan_rows: I32) -> StepLogprobs:
    """Return the log-probabilities of a message's sequences, whose rows in the plan are `plan_rows`."""
    place = np.full(
        int(max(logprobs.rows.max(initial=0), plan_rows.max(initial=0))) + 1, -1, np.int32
    )
    place[plan_rows] = np.arange(len(plan_rows), dtype=np.int32)
    at = place[logprobs.rows]
    keep = at >= 0
    keep[keep] = outputs.num_tokens[at[keep]] > 0
    shape = (len(at), logprobs.width)
    return StepLogprobs(
        at[keep],
        logprobs.width,
        logprobs.chosen[keep],
        logprobs.ranks[keep],
        logprobs.top_ids.reshape(shape)[keep].ravel(),
        logprobs.top_values.reshape(shape)[keep].ravel(),
    )
