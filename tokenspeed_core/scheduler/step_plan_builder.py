"""A step's plan while it is being made, and what is remembered of it until its result comes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tokenspeed_core.api.step import I32, I64, BlockCopy, BlockDelta, Bool, StepPlan
from tokenspeed_core.kv_cache.lease import ABSENT, BlockLease
from tokenspeed_core.kv_cache.manager import Entries
from tokenspeed_core.scheduler.columns import SlotColumns
from tokenspeed_core.scheduler.inits import slot_inits
from tokenspeed_core.scheduler.sequence import Sequence

_NONE = np.zeros(0, np.int32)
_NO_DELTA = BlockDelta(_NONE, _NONE, _NONE)
_NO_COPY = BlockCopy(_NONE, _NONE)


@dataclass(frozen=True, slots=True, eq=False)
class InFlight:
    """A launched step: whose rows they are, and how many new tokens each may bring."""

    plan: StepPlan
    sequence_ids: I64
    num_new: I32


class StepPlanBuilder:
    """Gathers rows (decodes at once, chunks one by one), table entries and newcomers of one step."""

    def __init__(self, step_id: int, columns: SlotColumns, num_groups: int) -> None:
        """Start without rows."""
        self.step_id = step_id
        self.num_tokens = self.num_chunk_tokens = 0  # query tokens; those of the chunk rows
        self._columns = columns
        self._decodes: tuple[I32, I32, I32] = (_NONE, _NONE, _NONE)
        self._chunks: list[tuple[int, int, int, bool]] = []
        self._growth: list[list[tuple[int, int, int]]] = [[] for _ in range(num_groups)]
        self._newcomers: list[tuple[int, Sequence]] = []

    @property
    def num_rows(self) -> int:
        """Rows so far."""
        return len(self._decodes[0]) + len(self._chunks)

    @property
    def is_empty(self) -> bool:
        """Whether the device need not hear of the step."""
        return not (self.num_rows or self._newcomers or any(self._growth))

    def decodes(self, slots: I32, num_query: I32, start: I32) -> None:
        """Set the decode rows: slots, query tokens each, and tokens computed before."""
        self._decodes = (slots, num_query, start)
        self.num_tokens += int(num_query.sum())

    def chunk(self, slot: int, start: int, end: int, is_last: bool) -> None:
        """Add a chunk row of the known tokens `[start, end)`; the last chunk samples."""
        self._chunks.append((slot, start, end, is_last))
        self.num_tokens += end - start
        self.num_chunk_tokens += end - start

    def grow(self, slot: int, entries: Entries) -> None:
        """Add block table entries of a slot."""
        for group, added in zip(self._growth, entries, strict=True):
            group.extend((slot, index, block) for index, block in added)

    def occupy(self, slot: int, sequence: Sequence, lease: BlockLease) -> None:
        """Note that a sequence takes a slot with the blocks it found cached."""
        self._newcomers.append((slot, sequence))
        for group, table in zip(self._growth, lease.tables, strict=True):
            group.extend(
                (slot, index, block) for index, block in enumerate(table) if block != ABSENT
            )

    def num_new(self) -> I32:
        """Return the upper bound of new tokens of each row."""
        if not self._chunks:
            return self._decodes[1]
        last = np.asarray([is_last for *_, is_last in self._chunks], np.int32)
        return np.concatenate((self._decodes[1], last))

    def freeze(
        self, copies: list[tuple[list[int], list[int]]], group_num_tokens: I32 | None
    ) -> StepPlan:
        """Return the plan."""
        slots, num_query, start = self._decodes
        wants: Bool = np.ones(len(slots), np.bool_)
        num_decodes, token_ids = len(slots), _NONE
        if self._chunks:
            chunk_slots, starts, ends, lasts = zip(*self._chunks, strict=True)
            slots = np.concatenate((slots, np.asarray(chunk_slots, np.int32)))
            start = np.concatenate((start, np.asarray(starts, np.int32)))
            num_query = np.concatenate((num_query, np.subtract(ends, starts, dtype=np.int32)))
            wants = np.concatenate((wants, np.asarray(lasts, np.bool_)))
            tokens = self._columns.tokens
            token_ids = np.concatenate([tokens[slot, a:b] for slot, a, b, _ in self._chunks])
        if group_num_tokens is None:
            group_num_tokens = np.asarray([self.num_tokens], np.int32)
        return StepPlan(
            step_id=self.step_id,
            num_decodes=num_decodes,
            slots=slots,
            num_query_tokens=num_query,
            num_computed_tokens=start,
            wants_logits=wants,
            token_ids=token_ids,
            adapter_ids=np.zeros(len(slots), np.int32),
            block_deltas=tuple(_delta(group) for group in self._growth),
            block_copies=tuple(_copy(src, dst) for src, dst in copies),
            slot_inits=slot_inits(self._newcomers) if self._newcomers else None,
            embedding_spans=(),
            group_num_tokens=group_num_tokens,
        )


def _delta(entries: list[tuple[int, int, int]]) -> BlockDelta:
    if not entries:
        return _NO_DELTA
    columns = np.asarray(entries, np.int32).T.copy()
    return BlockDelta(columns[0], columns[1], columns[2])


def _copy(src: list[int], dst: list[int]) -> BlockCopy:
    return BlockCopy(np.asarray(src, np.int32), np.asarray(dst, np.int32)) if src else _NO_COPY
