"""Turns a step's result into new tokens of sequences, and finds the sequences that end. Vectorized over rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields

import numpy as np

from tokenspeed_core.api import step as api
from tokenspeed_core.api.sampling import FinishReason
from tokenspeed_core.api.step import I32, I64, StepLogprobs, StepPlan, StepResult
from tokenspeed_core.engine.messages import Outputs, PromptLogprobs
from tokenspeed_core.scheduler.columns import SlotColumns
from tokenspeed_core.scheduler.sequence import Sequence


@dataclass(slots=True, eq=False)
class StepInFlight:
    """A planned step until its result is applied."""

    plan: StepPlan
    slots: I64  # [S] those of the plan
    sequence_ids: I64  # [S]
    max_new_tokens: I32  # [S] upper bound of each row's new tokens
    is_launched: bool = False  # forward and sampling were launched: the runner must collect it


@dataclass(frozen=True, slots=True, eq=False)
class NewTokens:
    """Tokens of one step for N sequences, as columns; `token_ids` are concatenated."""

    plan_rows: I64
    sequence_ids: I64
    num_tokens: I32
    token_ids: I32
    finish: I32  # FinishReason
    num_cached: I32  # cached prompt tokens, with the first token of a sequence; else 0


@dataclass(frozen=True, slots=True, eq=False)
class Collected:
    """The new tokens of the sequences that still have their slot."""

    slots: I64
    tokens: NewTokens

    def ended(self) -> Iterator[tuple[int, FinishReason]]:
        """Yield the slot and the reason of each sequence that ends."""
        finish = self.tokens.finish
        for i in finish.nonzero()[0].tolist():
            yield self.slots.item(i), FinishReason(finish.item(i))

    def with_full_block(self, columns: SlotColumns, granularity: int) -> I64:
        """Return the slots of unfinished sequences with a full block of computed tokens to add to the prefix index."""
        slots, finish = self.slots, self.tokens.finish
        if np.count_nonzero(finish):
            slots = slots[finish == FinishReason.NOT]
        num_computed = columns.num_known[slots] - 1
        return slots[num_computed - columns.num_hashed_tokens[slots] >= granularity]


@dataclass(slots=True, eq=False)
class AppliedStep:
    """A step after its tokens were added to its sequences, until `Scheduler.finish_applied`."""

    flight: StepInFlight
    result: StepResult
    collected: Collected
    kept: I32 | None  # [num_decodes] tokens that each decode keeps; None without draft tokens


@dataclass(frozen=True, slots=True, eq=False)
class KeptTokens:
    """The tokens of N rows up to the end of each sequence."""

    num_tokens: I32
    token_ids: I32
    rows: I64  # the row of each token
    offsets: I64  # the index of each token in its row
    finish: I32  # FinishReason of each row


def collect(columns: SlotColumns, flight: StepInFlight, result: StepResult) -> Collected:
    """Write a result's tokens into the columns. Rows of sequences that lost their slot are skipped."""
    counts = result.num_tokens
    has_slot = columns.sequence_id[flight.slots] == flight.sequence_ids
    plan_rows = (has_slot & (flight.max_new_tokens > 0)).nonzero()[0]
    slots = flight.slots[plan_rows]
    num_tokens = counts[plan_rows]
    columns.num_bound[slots] -= flight.max_new_tokens[plan_rows] - num_tokens
    if len(plan_rows) == len(counts):
        token_ids = result.token_ids
    else:
        starts = (np.cumsum(counts) - counts)[plan_rows]
        total = int(num_tokens.sum())
        token_ids = result.token_ids[np.repeat(starts, num_tokens) + _offsets(num_tokens, total)]
    num_known = columns.num_known[slots]
    room = columns.max_len[slots] - num_known
    kept = cut_at_end(num_tokens, token_ids, room, columns.stop_ids[slots])
    rows = kept.rows
    columns.tokens[slots[rows], num_known[rows] + kept.offsets] = kept.token_ids
    columns.num_known[slots] = num_known + kept.num_tokens
    num_cached = columns.num_cached[slots]
    columns.num_cached[slots] = num_cached * (kept.num_tokens == 0)
    tokens = NewTokens(
        plan_rows,
        flight.sequence_ids[plan_rows],
        kept.num_tokens,
        kept.token_ids,
        kept.finish,
        num_cached,
    )
    return Collected(slots, tokens)


def cut_at_end(num_tokens: I32, token_ids: I32, room: I32, stop_ids: I32) -> KeptTokens:
    """Apply the stop and length rules to N rows of new tokens.

    A sequence ends at its first stop token, which is kept, when it has no more room, or at a token of -1, which is
    dropped: its row had no finite logit. `room` [N] is how many tokens a sequence can still get, `stop_ids` [N, W] its
    stop tokens, padded with -1.
    """
    rows, offsets = _rows_and_offsets(num_tokens, len(token_ids))
    finish = np.zeros(len(num_tokens), np.int32)
    is_last = num_tokens >= room
    is_stop = token_ids[:, None] == stop_ids[rows]
    has_failed = token_ids < 0
    if not (np.count_nonzero(is_last) or np.count_nonzero(is_stop) or np.count_nonzero(has_failed)):
        return KeptTokens(num_tokens, token_ids, rows, offsets, finish)
    finish[is_last] = FinishReason.LENGTH
    num_kept = np.minimum(num_tokens, room)
    # Ascending, so that the first stop of a row comes first; later stops are then past the row's end.
    for i in np.flatnonzero(is_stop.any(axis=1) | has_failed):
        row = rows[i]
        if offsets[i] < num_kept[row]:
            num_kept[row] = offsets[i] + (0 if has_failed[i] else 1)
            finish[row] = FinishReason.ERROR if has_failed[i] else FinishReason.STOP
    keep = offsets < num_kept[rows]
    return KeptTokens(num_kept.astype(np.int32), token_ids[keep], rows[keep], offsets[keep], finish)


def num_kept(flight: StepInFlight, parts: Iterable[NewTokens]) -> I32:
    """Return how many new tokens the sequence of each row keeps, int32 [S]; 0 if it ended before."""
    kept = np.zeros(len(flight.slots), np.int32)
    for tokens in parts:
        kept[tokens.plan_rows] = tokens.num_tokens
    return kept


def rows_without_slot(collected: Collected, result: StepResult) -> Iterator[tuple[int, I32]]:
    """Yield the plan row and the tokens of each row that sampled and is not in `collected`."""
    counts = result.num_tokens
    if len(collected.slots) == len(counts):
        return
    ends = np.cumsum(counts)
    is_left_out = counts > 0
    is_left_out[collected.tokens.plan_rows] = False
    for row in np.flatnonzero(is_left_out):
        yield int(row), result.token_ids[ends[row] - counts[row] : ends[row]]


def append_tokens(sequence: Sequence, row: int, token_ids: I32) -> NewTokens:
    """Append tokens to a sequence without a slot, up to its end."""
    num_known = len(sequence.tokens)
    num_cached = sequence.num_cached if num_known == sequence.num_prompt else 0
    kept = cut_at_end(
        np.asarray([len(token_ids)], np.int32),
        token_ids,
        np.asarray([sequence.max_len - num_known], np.int32),
        sequence.request.stop_token_ids[np.newaxis],
    )
    sequence.append(kept.token_ids)
    return NewTokens(
        np.asarray([row], np.int64),
        np.asarray([sequence.sequence_id], np.int64),
        kept.num_tokens,
        kept.token_ids,
        kept.finish,
        np.asarray([num_cached], np.int32),
    )


def prompt_logprobs(
    flight: StepInFlight, result: api.PromptLogprobs | None
) -> tuple[PromptLogprobs, ...]:
    """Return the log-probabilities of prompt tokens in a step's result, for each sequence."""
    targets = flight.plan.prompt_targets
    if targets is None or result is None:
        return ()
    parts, start = [], 0
    for row, count in zip(targets.rows.tolist(), targets.counts.tolist(), strict=True):
        tokens = slice(start, start + count)
        top = slice(start * result.width, (start + count) * result.width)
        parts.append(
            PromptLogprobs(
                int(flight.sequence_ids[row]),
                result.width,
                result.chosen[tokens],
                result.ranks[tokens],
                result.top_ids[top],
                result.top_values[top],
            )
        )
        start += count
    return tuple(parts)


def make_outputs(
    parts: Iterable[NewTokens],
    result: StepResult,
    prompts: tuple[PromptLogprobs, ...] = (),
) -> Outputs:
    """Return the message with one step's new tokens: the tokens of its result up to the end of each sequence."""
    logprobs = result.logprobs
    first, *others = parts
    tokens = first
    if others:
        tokens = NewTokens(
            *(
                np.concatenate([getattr(part, field.name) for part in (first, *others)])
                for field in fields(NewTokens)
            )
        )
    return Outputs(
        tokens.sequence_ids,
        tokens.num_tokens,
        tokens.token_ids,
        tokens.finish,
        tokens.num_cached,
        None if logprobs is None else _select(logprobs, result.num_tokens, tokens),
        prompts,
    )


def _select(logprobs: StepLogprobs, counts: I32, tokens: NewTokens) -> StepLogprobs:
    """Return the log-probabilities of `tokens`, with rows that index its sequences.

    `counts` are the new tokens of each row of the plan. A sequence may keep fewer of them, or none.
    """
    last_row = max(logprobs.rows.max(initial=0), tokens.plan_rows.max(initial=0))
    index_of_row = np.full(int(last_row) + 1, -1, np.int32)
    index_of_row[tokens.plan_rows] = np.arange(len(tokens.plan_rows), dtype=np.int32)
    index = index_of_row[logprobs.rows]
    num_kept = np.append(tokens.num_tokens, np.int32(0))[index]  # -1: no sequence, no tokens
    num_entries = counts[logprobs.rows]
    keep = _offsets(num_entries, len(logprobs.chosen)) < np.repeat(num_kept, num_entries)
    shape = (len(keep), logprobs.width)
    is_left = num_kept > 0
    return StepLogprobs(
        index[is_left],
        logprobs.width,
        logprobs.chosen[keep],
        logprobs.ranks[keep],
        logprobs.top_ids.reshape(shape)[keep].ravel(),
        logprobs.top_values.reshape(shape)[keep].ravel(),
    )


def _rows_and_offsets(counts: I32, total: int) -> tuple[I64, I64]:
    """Return each token's row and its index in that row. Row i has `counts[i]` tokens; `total` is their sum."""
    if total == len(counts) and counts.all():  # one token per row
        return np.arange(total), np.zeros(total, np.int64)
    if len(counts) == 1:
        return np.zeros(total, np.int64), np.arange(total)
    starts = counts.cumsum(dtype=np.int64)
    starts -= counts
    rows = np.arange(len(counts)).repeat(counts)
    return rows, np.arange(total) - starts[rows]


def _offsets(counts: I32, total: int) -> I64:
    """Return 0, 1, ... within each row of `counts` tokens; `total` is their sum."""
    if total == len(counts) and counts.all():  # one token per row
        return np.zeros(total, np.int64)
    ends = np.cumsum(counts, dtype=np.int64)
    return np.arange(total) - np.repeat(ends - counts, counts)
