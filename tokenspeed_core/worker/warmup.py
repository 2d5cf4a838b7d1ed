"""Warm-up steps: the largest step, to measure its memory, and a step of each kind, to compile kernels.

These plans allocate no blocks, so all their tokens are written to the padding page.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tokenspeed_core.api.step import BlockDelta, LateInputs, NextDrafts, SlotInits, StepPlan
from tokenspeed_core.scheduler.limits import SchedulerLimits

_NONE = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class WarmupStep:
    """One step: its plan, and the late inputs of its sampling."""

    plan: StepPlan
    late: LateInputs | None


def largest_step(limits: SchedulerLimits, num_groups: int) -> WarmupStep:
    """Return the step that needs most memory: all rows, all tokens, and every kind of sampling."""
    if limits.max_drafts:
        return _largest_with_drafts(limits, num_groups)
    chunks = _spread(limits.max_num_tokens, limits.max_num_seqs, limits.max_model_len)
    return WarmupStep(
        _plan(num_groups, 0, chunks, _inits(len(chunks), draws=True, special=True)),
        _late(limits.vocab_size),
    )


def warmup_steps(limits: SchedulerLimits, num_groups: int) -> Iterator[WarmupStep]:
    """Yield steps that together call every kernel with every kind of shape that occurs while serving."""
    powers = [1 << bit for bit in range(limits.max_num_tokens.bit_length())]
    for size in sorted(
        {1, *powers, *(power + 1 for power in powers if power < limits.max_num_tokens)}
    ):
        yield WarmupStep(
            _plan(num_groups, 0, _spread(size, 1, limits.max_model_len), _inits(1)), None
        )
    for num_rows in sorted(
        {min(n, limits.max_num_seqs) for n in (1, 2, 16, 17, limits.max_num_seqs)}
    ):
        for draws, special in ((False, False), (True, False), (False, True), (True, True)):
            inits = _inits(num_rows, draws=draws, special=special)
            yield WarmupStep(
                _plan(num_groups, 0, [1] * num_rows, inits),
                _late(limits.vocab_size) if special else None,
            )
            yield WarmupStep(
                _plan(num_groups, num_rows, [], None), _late(limits.vocab_size) if special else None
            )
        counts = _draft_counts(limits, num_rows)
        if sum(counts):
            inits = _inits(num_rows, special=True)
            # The two steps before have added one token each to every row.
            plan = _plan(num_groups, num_rows, [], inits, counts)
            yield WarmupStep(replace(plan, num_computed_tokens=plan.num_computed_tokens + 2), None)
        if num_rows > 1 and num_rows + 4 <= limits.max_num_tokens:
            yield WarmupStep(
                _plan(num_groups, num_rows - 1, [min(5, limits.max_model_len)], None), None
            )


def with_next_drafts(plan: StepPlan, num_drafts: int) -> StepPlan:
    """Return a warm-up plan after which a draft model runs. Its entries after the step go to the padding page."""
    no_chunks = np.zeros(plan.num_rows - plan.num_decodes, np.int32)
    following = NextDrafts(num_drafts, no_chunks, np.zeros(plan.num_rows, np.int32))
    return replace(plan, next_drafts=following)


def _largest_with_drafts(limits: SchedulerLimits, num_groups: int) -> WarmupStep:
    """Return a step in which all rows but the last are decodes with draft tokens; the last is a chunk."""
    num_decodes = limits.max_num_seqs - 1 or 1
    counts = _draft_counts(limits, num_decodes)
    rest = min(limits.max_num_tokens - num_decodes - sum(counts), limits.max_model_len)
    chunks = [rest] if rest > 0 and num_decodes < limits.max_num_seqs else []
    inits = _inits(num_decodes + len(chunks), draws=True, special=True)
    return WarmupStep(_plan(num_groups, num_decodes, chunks, inits, counts), None)


def _draft_counts(limits: SchedulerLimits, num_rows: int) -> list[int]:
    """Return as many draft tokens of each row as a step may have."""
    left = max(0, min(limits.max_draft_tokens, limits.max_num_tokens - num_rows))
    counts = []
    for _ in range(num_rows):
        counts.append(min(left, limits.max_drafts, limits.max_model_len - 1))
        left -= counts[-1]
    return counts


def _spread(num_tokens: int, num_rows: int, max_model_len: int) -> list[int]:
    """Return the chunk length of each row. The first rows take the tokens beyond one per row."""
    chunks, left = [], num_tokens - num_rows
    for _ in range(num_rows):
        extra = min(left, max_model_len - 1)
        chunks.append(1 + extra)
        left -= extra
    return chunks


def _plan(
    num_groups: int,
    num_decodes: int,
    chunks: Sequence[int],
    inits: SlotInits | None,
    num_drafts: Sequence[int] = (),
) -> StepPlan:
    num_rows = num_decodes + len(chunks)
    counts = np.array([1] * num_decodes + list(chunks), np.int32)
    counts[: len(num_drafts)] += np.array(num_drafts, np.int32)
    return StepPlan(
        step_id=-1,
        num_decodes=num_decodes,
        slots=np.arange(num_rows, dtype=np.int32),
        num_query_tokens=counts,
        num_computed_tokens=np.zeros(num_rows, np.int32),
        wants_logits=np.ones(num_rows, bool),
        token_ids=np.zeros(sum(chunks), np.int32),
        adapter_ids=np.zeros(num_rows, np.int32),
        block_deltas=(BlockDelta(_NONE, _NONE, _NONE),) * num_groups,
        slot_inits=inits,
        num_draft_tokens=sum(num_drafts),
        draft_token_ids=np.zeros(sum(num_drafts), np.int32) if num_drafts else None,
    )


def _inits(num_rows: int, *, draws: bool = False, special: bool = False) -> SlotInits:
    def column(value: float) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        return np.full(num_rows, value, np.float32)

    starts = np.arange(num_rows + 1, dtype=np.int32) * int(special)
    return SlotInits(
        slots=np.arange(num_rows, dtype=np.int32),
        temperature=column(1.0 if draws else 0.0),
        top_k=np.full(num_rows, 20 if draws else 0, np.int32),
        top_p=column(0.9),
        min_p=column(0.0),
        presence_penalty=column(0.5 if special else 0.0),
        frequency_penalty=column(0.0),
        repetition_penalty=column(1.0),
        seed=np.arange(num_rows, dtype=np.int64),
        logprobs=np.full(num_rows, 5 if special else -1, np.int32),
        bias_starts=starts,
        bias_ids=np.zeros(starts[-1], np.int32),
        bias_values=np.zeros(starts[-1], np.float32),
        history_starts=starts,
        history_ids=np.zeros(starts[-1], np.int32),
        history_num_prompt=np.full(num_rows, int(special), np.int32),
        num_endless=np.full(num_rows, int(special), np.int32),
        end_starts=starts,
        end_ids=np.zeros(starts[-1], np.int32),
    )


def _late(vocab_size: int) -> LateInputs:
    return LateInputs(np.zeros(1, np.int32), np.full(-(-vocab_size // 32), -1, np.int32))
