"""From a plan and the slots' state to the inputs of a forward.

There is one path: `StagedLayout.fill` writes a plan into a host buffer, one copy moves it to the device, and
`begin_step` updates the slots' state there and derives positions, block tables and KV slots. A captured step uses the
layout of its bucket and buffers that it keeps; an eager step uses a layout of exactly its size and new buffers.
Only eager steps with draft tokens send columns of their own, since a layout with draft tokens has no rows of prompts.
Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tokenspeed_core.api.attention import AttentionStep
from tokenspeed_core.api.step import I32, StepPlan
from tokenspeed_core.worker.drafts import DraftRows, DraftTokens, SampledTokens
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

    `token_ids`, `positions` int64 [T]. `logit_index` int64 [R] is the query token that each of the R
    sampling rows takes its hidden state from (None: token i for row i).
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    groups: tuple[GroupInputs, ...]
    rows: SamplingRows
    logit_index: torch.Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class StepBuffers:
    """The outputs of `begin_step`, for S rows and T tokens.

    `token_ids`, `positions` int64 [T], in which a step with chunks has its chunks' values already; `seq_lens` int32 [S]
    and `new_positions` int64 [S], the same lengths; of each cache group `tables` int32 [S, B] and `kv_slots` int64 [T].
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
    num_decodes: int,
    buffers: StepBuffers,
) -> None:
    """Write the changed words of the state, advance the lengths, and fill the buffers. Padding stays at length 0."""
    slots = columns["slots"]
    kernels.advance(
        state.words,
        columns["words"],
        columns["values"],
        slots,
        columns["advance"],
        buffers.token_ids[:num_decodes],
        buffers.positions[:num_decodes],
        buffers.seq_lens,
        buffers.new_positions,
        *state.layout.heads,
    )
    token_slots = columns.get("token_slots", slots)
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
        if plan.num_draft_tokens:
            return self._make_with_drafts(plan)
        words, values = self._state.layout.writes(plan)
        size = BucketSize(plan.num_decodes, plan.num_rows - plan.num_decodes, len(plan.token_ids))
        layout = StagedLayout(size, len(words))
        host = np.empty(layout.num_int64, np.int64)
        layout.fill(host, plan, words, values, self._state.layout)
        query_start = np.zeros(plan.num_rows + 1, np.int32)
        np.cumsum(plan.num_query_tokens, out=query_start[1:])
        sampled = np.flatnonzero(plan.wants_logits)
        staged, device_query_start, device_sampled = self._transfer.send(
            (host, query_start, sampled)
        )
        columns = layout.columns(staged)
        buffers = self._buffers(plan, size, columns)
        begin_step(self._state, self._kernels, columns, size.num_decodes, buffers)
        bounds = _Bounds(plan, query_start, device_query_start, buffers.seq_lens)
        groups = tuple(
            bounds.group(kv_slots, table, split=split)
            for kv_slots, table, split in zip(
                buffers.kv_slots, buffers.tables, self._split, strict=True
            )
        )
        slots, new_positions = columns["slots"], buffers.new_positions
        if len(sampled) < plan.num_rows:
            slots, new_positions = slots[device_sampled], new_positions[device_sampled]
        last = None
        if len(sampled) < size.num_tokens:
            last = columns["last"][device_sampled] if size.num_chunks else device_sampled
        return StepInputs(
            token_ids=buffers.token_ids,
            positions=buffers.positions,
            groups=groups,
            rows=SamplingRows(
                sampled.astype(np.int32),
                plan.slots[sampled],
                slots,
                new_positions,
                buffers.token_ids,
                last,
            ),
            logit_index=last,
        )

    def _make_with_drafts(self, plan: StepPlan) -> StepInputs:
        """Return the inputs of a step with draft tokens; see `make`. Attention treats all rows as chunks."""
        state, kernels = self._state, self._kernels
        tokens, sampled = DraftTokens.of(plan), SampledTokens.of(plan)
        query_start = np.zeros(plan.num_rows + 1, np.int32)
        np.cumsum(plan.num_query_tokens, out=query_start[1:])
        sampled_slots = plan.slots[sampled.rows]
        num_sampled = sampled.num_drafts + 1
        (
            slots,
            words,
            values,
            advance,
            device_query_start,
            token_slots,
            token_ids,
            positions,
            rows,
            first,
            last,
            num_drafts,
            first_sampled,
            device_slots,
            offsets,
            row_slots,
        ) = self._transfer.send(
            (
                plan.slots.astype(np.int64),
                *state.layout.writes(plan),
                plan.num_query_tokens,
                query_start,
                tokens.slots,
                tokens.ids,
                tokens.positions,
                tokens.rows,
                tokens.first,
                sampled.tokens,
                sampled.num_drafts,
                sampled.first,
                sampled_slots.astype(np.int64),
                sampled.offsets,
                np.repeat(sampled_slots, num_sampled).astype(np.int64),
            )
        )
        seq_lens, ends = advance.new_empty(plan.num_rows), slots.new_empty(plan.num_rows)
        row_ids, row_positions = slots.new_empty((2, plan.num_decodes))
        kernels.advance(
            state.words,
            words,
            values,
            slots,
            advance,
            row_ids,
            row_positions,
            seq_lens,
            ends,
            *state.layout.heads,
        )
        if plan.draft_token_ids is None:
            place = (positions[: len(rows)] - 1).clamp_(min=0)
            token_ids[: len(rows)] = state.drafts[token_slots[: len(rows)], place]
        positions[: len(rows)] += row_positions[rows]
        token_ids.index_copy_(0, first, row_ids)
        bounds = _Bounds(plan, query_start, device_query_start, seq_lens)
        width, groups = self._table_width(plan), []
        for table in state.tables:
            block_table = state.words.new_empty((plan.num_rows, width))
            kv_slots = slots.new_empty(len(token_slots))
            kernels.map(table[:, :width], slots, token_slots, positions, block_table, kv_slots)
            groups.append(bounds.chunks(kv_slots, block_table))
        new_positions = positions[last] + 1
        drafts = DraftRows(
            sampled,
            num_drafts,
            first_sampled,
            device_slots,
            offsets,
            new_positions[first_sampled + num_drafts].to(torch.int32),
            int(sampled.num_drafts.max()),
        )
        return StepInputs(
            token_ids=token_ids,
            positions=positions,
            groups=tuple(groups),
            rows=SamplingRows(
                np.repeat(sampled.rows, num_sampled).astype(np.int32),
                np.repeat(sampled_slots, num_sampled),
                row_slots,
                new_positions,
                token_ids,
                last,
                drafts,
            ),
            logit_index=last,
        )

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
            new_positions=slots.new_empty(size.num_rows),
            tables=[self._state.words.new_empty((size.num_rows, width)) for _ in range(num_groups)],
            kv_slots=[slots.new_empty(size.num_tokens) for _ in range(num_groups)],
        )


class _Bounds:
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
        middle, end = self._plan.num_decodes, self._plan.num_rows
        decodes = prefills = None
        if split and 0 < middle < end:
            decodes = self._part(table, 0, middle)
            prefills = self._part(table, middle, end)
        return GroupInputs(kv_slots, self._part(table, 0, end), middle, decodes, prefills)

    def chunks(self, kv_slots: torch.Tensor, table: torch.Tensor) -> GroupInputs:
        """Return the inputs of a cache group whose rows are all chunks."""
        return GroupInputs(kv_slots, self._part(table, 0, self._plan.num_rows), 0, None, None)

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
