"""Computes the inputs of a forward from a plan and the slots' state.

There is one path: `StagedLayout.fill` writes a plan into a host buffer, one copy moves it to the device, and
`begin_step` updates the slots' state there and derives positions, block tables and KV slots. A captured step uses the
layout of its bucket and buffers that it keeps; an eager step uses a layout of exactly its size and new buffers.
Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tokenspeed_core.api.attention import AttentionStep
from tokenspeed_core.api.step import I32, I64, StepPlan
from tokenspeed_core.worker.drafts import DraftRows, SampledTokens
from tokenspeed_core.worker.sampler import RunnerKernels, SamplingRows
from tokenspeed_core.worker.slots import SlotState
from tokenspeed_core.worker.staged import BucketSize, StagedLayout
from tokenspeed_core.worker.transfer import HostDeviceTransfer

Columns = Mapping[str, torch.Tensor]
"""The columns of a StagedLayout on the device."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupInputs:
    """The attention inputs of one cache group.

    `kv_slots` int64 [T]: block * block_size + offset. `decodes` and `prefills` are the two parts of a mixed step, for
    groups that serve them separately; None if there is one part only.
    """

    kv_slots: torch.Tensor
    step: AttentionStep
    num_decodes: int
    decodes: AttentionStep | None
    prefills: AttentionStep | None


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """The inputs of a forward, and the rows that sample after it.

    `token_ids`, `positions` int64 [T].
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    groups: tuple[GroupInputs, ...]
    rows: SamplingRows


@dataclass(frozen=True, slots=True, eq=False)
class StepBuffers:
    """The outputs of `begin_step`, for S rows, T tokens and R rows of logits.

    `token_ids`, `positions` int64 [T], in which a step with chunks has its chunks' values already; `seq_lens` int32 [S];
    `new_positions` int64 [R]; of each cache group `tables` int32 [S, B] and `kv_slots` int64 [T].
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    seq_lens: torch.Tensor
    new_positions: torch.Tensor
    tables: Sequence[torch.Tensor]
    kv_slots: Sequence[torch.Tensor]


def begin_step(
    state: SlotState,
    kernels: RunnerKernels,
    columns: Columns,
    size: BucketSize,
    buffers: StepBuffers,
) -> None:
    """Write the changed words of the state, advance the lengths, and fill the buffers. Padding stays at length 0.

    Lengths advance as if all draft tokens were accepted.
    """
    slots, last_tokens = columns["slots"], state.layout.last_tokens
    token_slots = columns.get("token_slots", slots)
    read, ends = size.num_decodes, buffers.new_positions
    if size.num_draft_tokens:  # `gather` reads the decodes, and writes over their ends
        read, ends = 0, ends[size.num_draft_tokens :]
    kernels.advance(
        state.words,
        columns["words"],
        columns["values"],
        slots,
        columns["advance"],
        buffers.token_ids[:read],
        buffers.positions[:read],
        buffers.seq_lens,
        ends,
        *last_tokens,
    )
    if size.num_draft_tokens:
        read = size.num_decode_tokens
        kernels.gather(
            state.words,
            columns["token_words"],
            token_slots[:read],
            columns["until_end"],
            buffers.token_ids[:read],
            buffers.positions[:read],
            buffers.new_positions[:read],
            *last_tokens,
        )
    for table, rows, kv_slots in zip(state.tables, buffers.tables, buffers.kv_slots, strict=True):
        used = table[:, : rows.shape[1]]
        kernels.map(used, slots, token_slots, buffers.positions, rows, kv_slots)


class EagerInputs:
    """Makes the inputs of steps that are not captured."""

    def __init__(
        self,
        state: SlotState,
        kernels: RunnerKernels,
        block_size: int,
        split: tuple[bool, ...],
        transfer: HostDeviceTransfer,
    ) -> None:
        """`split` says for each cache group whether mixed steps run in two parts."""
        self._state = state
        self._kernels = kernels
        self._block_size = block_size
        self._split = split
        self._transfer = transfer

    def make(self, plan: StepPlan) -> StepInputs:
        """Apply a plan to the slots' state and return the inputs. The plan has at least one row."""
        words, values = self._state.layout.writes(plan)
        num_drafts = plan.num_draft_tokens
        num_chunks = plan.num_rows - plan.num_decodes
        size = BucketSize(
            plan.num_decodes, num_chunks, len(plan.token_ids), num_draft_tokens=num_drafts
        )
        layout = StagedLayout(size, len(words))
        host = np.empty(layout.num_int64, np.int64)
        layout.fill(host, plan, words, values, self._state.layout)
        query_start = np.zeros(plan.num_rows + 1, np.int32)
        np.cumsum(plan.num_query_tokens, out=query_start[1:])
        rows = at = np.flatnonzero(plan.wants_logits)
        if num_drafts:  # every token of a decode has a row of logits
            at = np.concatenate((np.arange(num_drafts), rows + num_drafts))
        staged, device_query_start, device_at = self._transfer.send((host, query_start, at))
        columns = layout.columns(staged)
        buffers = self._buffers(plan, size, columns)
        begin_step(self._state, self._kernels, columns, size, buffers)
        eager = _EagerRows(plan, query_start, device_query_start, buffers.seq_lens)
        groups = tuple(
            eager.group(kv_slots, table, split=split)
            for kv_slots, table, split in zip(
                buffers.kv_slots, buffers.tables, self._split, strict=True
            )
        )
        sampling = _sampling_rows(plan, size, columns, buffers, rows, device_at)
        return StepInputs(buffers.token_ids, buffers.positions, groups, sampling)

    def _table_width(self, plan: StepPlan) -> int:
        # Kernels on the CPU read whole tables, so keep them short.
        if self._state.words.device.type == "cpu":
            longest = int((plan.num_computed_tokens + plan.num_query_tokens).max())
            return -(-longest // self._block_size)
        return self._state.layout.num_blocks

    def _buffers(self, plan: StepPlan, size: BucketSize, columns: Columns) -> StepBuffers:
        slots, width = columns["slots"], self._table_width(plan)
        num_groups = len(self._state.tables)
        if size.num_chunks:
            token_ids, positions = columns["ids"], columns["positions"]
        else:
            token_ids = slots.new_empty(size.num_tokens)
            positions = slots.new_empty(size.num_tokens)
        return StepBuffers(
            token_ids=token_ids,
            positions=positions,
            seq_lens=columns["advance"].new_empty(size.num_rows),
            new_positions=slots.new_empty(size.num_sampled),
            tables=[self._state.words.new_empty((size.num_rows, width)) for _ in range(num_groups)],
            kv_slots=[slots.new_empty(size.num_tokens) for _ in range(num_groups)],
        )


def _sampling_rows(
    plan: StepPlan,
    size: BucketSize,
    columns: Columns,
    buffers: StepBuffers,
    rows: I64,
    at: torch.Tensor,
) -> SamplingRows:
    """Return the rows that sample. `rows` int64 [S] are those of the plan, `at` int64 [R] those of the layout's logits."""
    is_partial = len(rows) < plan.num_rows
    new_positions = buffers.new_positions[at] if is_partial else buffers.new_positions
    last = columns["last"][at] if size.num_chunks else at
    if not size.num_draft_tokens:
        slots = columns["slots"]
        return SamplingRows(
            rows.astype(np.int32),
            plan.slots[rows],
            slots[at] if is_partial else slots,
            new_positions,
            buffers.token_ids,
            last if len(at) < size.num_tokens else None,
        )
    sampled, slots = SampledTokens.of(plan), columns["token_slots"]
    drafts = DraftRows.staged(columns, buffers.seq_lens, int(sampled.num_drafts.max()))
    device_rows = at[size.num_draft_tokens :] - size.num_draft_tokens if is_partial else None
    plan_rows = rows.repeat(sampled.num_drafts + 1).astype(np.int32)
    return SamplingRows(
        plan_rows,
        plan.slots[plan_rows],
        slots[last] if size.num_chunks else slots,
        new_positions,
        buffers.token_ids,
        last,
        drafts.of_step(sampled, device_rows),
    )


class _EagerRows:
    """The rows of an eager step. The host knows their exact lengths."""

    def __init__(
        self,
        plan: StepPlan,
        host_query_start: I32,
        query_start: torch.Tensor,
        seq_lens: torch.Tensor,
    ) -> None:
        self._plan = plan
        self._host_query_start: tuple[int, ...] = tuple(host_query_start.tolist())
        lengths = plan.num_computed_tokens + plan.num_query_tokens
        self._host_seq_lens: tuple[int, ...] = tuple(lengths.tolist())
        self._query_start = query_start
        self._seq_lens = seq_lens

    def group(self, kv_slots: torch.Tensor, table: torch.Tensor, *, split: bool) -> GroupInputs:
        """Return the inputs of a cache group, with both parts of a mixed step if `split`."""
        end = self._plan.num_rows
        # Eager decodes with draft tokens are served as chunks.
        middle = 0 if self._plan.num_draft_tokens else self._plan.num_decodes
        decodes = prefills = None
        if split and 0 < middle < end:
            decodes = self._part(table, 0, middle)
            prefills = self._part(table, middle, end)
        return GroupInputs(kv_slots, self._part(table, 0, end), middle, decodes, prefills)

    def _part(self, table: torch.Tensor, start: int, end: int) -> AttentionStep:
        host_start = self._host_query_start[start : end + 1]
        query_start = self._query_start[start : end + 1]
        first = host_start[0]
        if first:
            host_start = tuple(each - first for each in host_start)
            query_start = query_start - first
        host_seq_lens = self._host_seq_lens[start:end]
        return AttentionStep(
            num_rows=end - start,
            num_tokens=host_start[-1],
            max_num_query=int(self._plan.num_query_tokens[start:end].max()),
            max_seq_len=max(host_seq_lens),
            query_start=query_start,
            seq_lens=self._seq_lens[start:end],
            block_table=table[start:end],
            host_query_start=host_start,
            host_seq_lens=host_seq_lens,
        )
