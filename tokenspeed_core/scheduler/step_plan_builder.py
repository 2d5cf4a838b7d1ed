"""Collects the rows of a step and turns them into a plan."""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from dataclasses import dataclass

import numpy as np

from tokenspeed_core.api.step import I32, I64, BlockDelta, Bool, NextDrafts, PromptTargets, StepPlan
from tokenspeed_core.kv_cache.lease import ABSENT, BlockLease
from tokenspeed_core.kv_cache.match import TableEntries
from tokenspeed_core.scheduler.columns import SlotColumns
from tokenspeed_core.scheduler.sequence import Sequence
from tokenspeed_core.scheduler.slot_inits import slot_inits

_NONE = np.zeros(0, np.int32)
_NO_SLOTS = np.zeros(0, np.int64)
_NO_DELTA = BlockDelta(_NONE, _NONE, _NONE)


@dataclass(frozen=True, slots=True)
class _Scored:
    """Known tokens of a chunk, for which the log-probabilities of their successors are requested."""

    chunk: int
    tokens: range
    width: int


@dataclass(frozen=True, slots=True)
class _Chunk:
    """The known tokens `[start, end)` of the sequence in a slot; the last chunk samples."""

    slot: int
    start: int
    end: int
    is_last: bool


class _TableChanges:
    """Changes to the block tables of one group, as columns."""

    def __init__(self) -> None:
        self.slots: list[int] = []
        self.indices: list[int] = []
        self.blocks: list[int] = []

    def add(self, slot: int, start: int, blocks: ListLike[int]) -> None:
        """Set consecutive entries of a slot's table."""
        self.slots += [slot] * len(blocks)
        self.indices += range(start, start + len(blocks))
        self.blocks += blocks

    def delta(self) -> BlockDelta:
        """Return the changes as arrays."""
        if not self.slots:
            return _NO_DELTA
        return BlockDelta(
            np.asarray(self.slots, np.int32),
            np.asarray(self.indices, np.int32),
            np.asarray(self.blocks, np.int32),
        )


class StepPlanBuilder:
    """The rows, block table changes and new sequences of one step."""

    def __init__(self, step_id: int, columns: SlotColumns, num_groups: int) -> None:
        """Start without rows."""
        self.step_id = step_id
        self.num_tokens = 0  # query tokens of all rows
        self.num_chunk_tokens = 0  # query tokens of the chunk rows
        self._columns = columns
        self._decode_slots = _NO_SLOTS
        self._decode_num_query = _NONE
        self._decode_start = _NONE
        self._num_draft_tokens = 0
        self._draft_token_ids: I32 | None = None
        self._num_next_drafts: int | None = None
        self._returns_draft_ids = False
        self._chunks: list[_Chunk] = []
        self._scored: list[_Scored] = []
        self._changes = [_TableChanges() for _ in range(num_groups)]
        self._new_slots: list[int] = []
        self._new_sequences: list[Sequence] = []

    @property
    def is_empty(self) -> bool:
        """Whether the step would change nothing on the device."""
        has_rows = len(self._decode_slots) or self._chunks
        return not (has_rows or self._new_slots or any(each.slots for each in self._changes))

    def set_decodes(self, slots: I64, num_query: I32, start: I32) -> int:
        """Set the decode rows: their slots, query tokens, and upper bounds of computed tokens.

        Returns the number of their draft tokens.
        """
        self._decode_slots = slots
        self._decode_num_query = num_query
        self._decode_start = start
        num_tokens = int(num_query.sum())
        self.num_tokens += num_tokens
        self._num_draft_tokens = num_tokens - len(slots)
        return self._num_draft_tokens

    def set_drafts(self, token_ids: I32 | None) -> None:
        """Set the draft tokens of the decode rows; None: the device has them."""
        self._draft_token_ids = token_ids

    def set_next_drafts(self, num_drafts: int, *, returns_ids: bool) -> None:
        """Let a draft model run after the step and make `num_drafts` tokens for each row that samples."""
        self._num_next_drafts = num_drafts
        self._returns_draft_ids = returns_ids

    def sampling_slots(self) -> I64:
        """Return the slots of the rows that sample."""
        last = [chunk.slot for chunk in self._chunks if chunk.is_last]
        return np.concatenate((self._decode_slots, np.asarray(last, np.int64)))

    def chunk_slots(self) -> I64:
        """Return the slots of the chunk rows."""
        return np.asarray([chunk.slot for chunk in self._chunks], np.int64)

    def add_chunk(self, slot: int, start: int, end: int, *, is_last: bool) -> None:
        """Add a chunk row for the known tokens `[start, end)`; the last chunk samples."""
        self._chunks.append(_Chunk(slot, start, end, is_last))
        self.num_tokens += end - start
        self.num_chunk_tokens += end - start

    def score(self, tokens: range, width: int) -> None:
        """Request log-probabilities of the successors of known tokens of the last chunk, with `width` alternatives."""
        self._scored.append(_Scored(len(self._chunks) - 1, tokens, width))

    def add_table_entries(self, slot: int, entries: tuple[TableEntries, ...]) -> None:
        """Add new block table entries of a slot, one range per group."""
        for changes, each in zip(self._changes, entries, strict=True):
            changes.add(slot, each.start, each.blocks)

    def add_sequence(self, slot: int, sequence: Sequence, lease: BlockLease) -> None:
        """Add a sequence that takes a slot, with the blocks of its prefix hit."""
        self._new_slots.append(slot)
        self._new_sequences.append(sequence)
        for changes, table in zip(self._changes, lease.tables, strict=True):
            start = table.count(ABSENT)  # absent entries precede all others
            changes.add(slot, start, table[start:])

    def max_new_tokens(self) -> I32:
        """Return the upper bound of each row's new tokens."""
        if not self._chunks:
            return self._decode_num_query
        last = np.asarray([chunk.is_last for chunk in self._chunks], np.int32)
        return np.concatenate((self._decode_num_query, last))

    def build(self) -> StepPlan:
        """Return the plan."""
        num_decodes = len(self._decode_slots)
        num_query, start = self._decode_num_query, self._decode_start
        slots = self._decode_slots.astype(np.int32)
        wants_logits: Bool = np.ones(num_decodes, np.bool_)
        token_ids = _NONE
        if self._chunks:
            chunks = self._chunks
            starts = np.asarray([chunk.start for chunk in chunks], np.int32)
            ends = np.asarray([chunk.end for chunk in chunks], np.int32)
            chunk_slots = np.asarray([chunk.slot for chunk in chunks], np.int32)
            is_last = np.asarray([chunk.is_last for chunk in chunks], np.bool_)
            slots = np.concatenate((slots, chunk_slots))
            start = np.concatenate((start, starts))
            num_query = np.concatenate((num_query, ends - starts))
            wants_logits = np.concatenate((wants_logits, is_last))
            tokens = self._columns.tokens
            token_ids = np.concatenate(
                [tokens[chunk.slot, chunk.start : chunk.end] for chunk in chunks]
            )
        has_new = bool(self._new_slots)
        return StepPlan(
            step_id=self.step_id,
            num_decodes=num_decodes,
            slots=slots,
            num_query_tokens=num_query,
            num_computed_tokens=start,
            wants_logits=wants_logits,
            token_ids=token_ids,
            adapter_ids=np.zeros(len(slots), np.int32),
            block_deltas=tuple(changes.delta() for changes in self._changes),
            slot_inits=slot_inits(self._new_slots, self._new_sequences) if has_new else None,
            prompt_targets=self._prompt_targets() if self._scored else None,
            num_draft_tokens=self._num_draft_tokens,
            draft_token_ids=self._draft_token_ids,
            next_drafts=self._next_drafts(slots),
        )

    def _next_drafts(self, slots: I32) -> NextDrafts | None:
        if self._num_next_drafts is None:
            return None
        tokens = self._columns.tokens
        # The token after a prompt is not known, and not used.
        following = [
            0 if chunk.is_last else tokens[chunk.slot, chunk.end] for chunk in self._chunks
        ]
        return NextDrafts(
            self._num_next_drafts,
            np.asarray(following, np.int32),
            self._columns.capacity[slots],
            self._returns_draft_ids,
        )

    def _prompt_targets(self) -> PromptTargets:
        scored, num_decodes, tokens = self._scored, len(self._decode_slots), self._columns.tokens
        chunks = [self._chunks[each.chunk] for each in scored]
        return PromptTargets(
            rows=np.asarray([num_decodes + each.chunk for each in scored], np.int32),
            starts=np.asarray(
                [
                    each.tokens.start - chunk.start
                    for each, chunk in zip(scored, chunks, strict=True)
                ],
                np.int32,
            ),
            counts=np.asarray([len(each.tokens) for each in scored], np.int32),
            width=max(each.width for each in scored),
            token_ids=np.concatenate(
                [
                    tokens[chunk.slot, each.tokens.start + 1 : each.tokens.stop + 1]
                    for each, chunk in zip(scored, chunks, strict=True)
                ]
            ),
        )
