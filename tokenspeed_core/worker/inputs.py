"""From a plan and the slots' state to what a forward takes: token ids, positions, block tables, KV slots.

Two ways to the same tensors: with NumPy where the state is host memory, with kernels where it is
the device's. Neither waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from tokenspeed_core.api.attention import AttentionStep
from tokenspeed_core.api.step import I32, I64, StepPlan
from tokenspeed_core.worker.sampler import RunnerKernels, SamplingRows
from tokenspeed_core.worker.slots import SlotState
from tokenspeed_core.worker.transfer import HostDeviceTransfer


@dataclass(frozen=True, slots=True, eq=False)
class GroupInputs:
    """What the attention of one cache group needs: where to write, and the step for the kernels.

    `kv_slots` int64 [T]: block * block_size + offset. `decodes` and `prefills` are the two parts of a
    mixed step, for groups that are served in two; None where there is one part only.
    """

    kv_slots: torch.Tensor
    step: AttentionStep
    num_decodes: int
    decodes: AttentionStep | None
    prefills: AttentionStep | None


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """What a forward takes, and what the sampling after it does.

    `token_ids`, `positions` int64 [T]. `rows` are those that sample, R of them; `logit_index` int64 [R] the query
    token whose hidden state each needs (None: token i for row i).
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    groups: tuple[GroupInputs, ...]
    rows: SamplingRows
    logit_index: torch.Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class _Shape:
    """What the host knows of a step: where each row's query tokens start, and its bounds."""

    plan: StepPlan
    query_start: I32
    host_query_start: tuple[int, ...]
    host_seq_lens: tuple[int, ...]
    is_decode: bool
    rows: I32

    @classmethod
    def of(cls, plan: StepPlan) -> _Shape:
        is_decode = plan.num_decodes == plan.num_rows
        query_start = np.zeros(plan.num_rows + 1, np.int32)
        np.cumsum(plan.num_query_tokens, out=query_start[1:])
        lengths = plan.num_computed_tokens + plan.num_query_tokens
        rows = np.flatnonzero(plan.wants_logits).astype(np.int32)
        return cls(
            plan, query_start, tuple(query_start.tolist()), tuple(lengths.tolist()), is_decode, rows
        )

    @property
    def samples_each_token(self) -> bool:
        """Whether row i's logits are those of query token i, for all rows."""
        return len(self.rows) == self.host_query_start[-1]

    def token_rows(self) -> tuple[I64, I64]:
        """Return the row of each query token, and its place in the row."""
        rows = np.repeat(np.arange(self.plan.num_rows), self.plan.num_query_tokens)
        return rows, np.arange(self.host_query_start[-1]) - self.query_start[rows]

    def group(
        self,
        mapping: torch.Tensor,
        query_start: torch.Tensor,
        seq_lens: torch.Tensor,
        table: torch.Tensor,
        split: bool,
    ) -> GroupInputs:
        """Return the inputs of a group, with both parts of a mixed step where that is to be `split`."""
        part = partial(self._part, query_start, seq_lens, table)
        middle, end = self.plan.num_decodes, self.plan.num_rows
        parts = (part(0, middle), part(middle, end)) if split and 0 < middle < end else (None, None)
        return GroupInputs(mapping, part(0, end), middle, *parts)

    def _part(
        self,
        query_start: torch.Tensor,
        seq_lens: torch.Tensor,
        table: torch.Tensor,
        start: int,
        end: int,
    ) -> AttentionStep:
        first = self.host_query_start[start]
        host_start = self.host_query_start[start : end + 1]
        return AttentionStep(
            num_rows=end - start,
            num_tokens=host_start[-1] - first,
            max_num_query=int(self.plan.num_query_tokens[start:end].max()),
            max_seq_len=max(self.host_seq_lens[start:end]),
            query_start=query_start[start : end + 1] - first if first else query_start[: end + 1],
            seq_lens=seq_lens[start:end],
            block_table=table[start:end],
            host_query_start=tuple(each - first for each in host_start) if first else host_start,
            host_seq_lens=self.host_seq_lens[start:end],
        )


class HostInputMaker:
    """Makes inputs where the state is host memory."""

    def __init__(self, state: SlotState, block_size: int, split: tuple[bool, ...]) -> None:
        """`split` says of each cache group whether mixed steps are needed in two parts."""
        self._layout = state.layout
        self._words = state.words.numpy()
        self._last_token = state.last_token.numpy()
        self._seq_len = state.seq_len.numpy()
        self._tables = [table.numpy() for table in state.tables]
        self._block_size = block_size
        self._split = split

    def make(self, plan: StepPlan) -> StepInputs:
        """Apply a plan's deltas, move lengths on, and return the inputs. The plan has at least one row."""
        shape = _Shape.of(plan)
        words, values = self._layout.writes(plan)
        self._words[words] = values
        slots = plan.slots
        before = self._seq_len[slots]
        seq_lens = before + plan.num_query_tokens
        self._seq_len[slots] = seq_lens
        if shape.is_decode:
            token_ids, positions = self._last_token[slots].astype(np.int64), before.astype(np.int64)
            token_slots = slots
        else:
            rows, offsets = shape.token_rows()
            decodes = self._last_token[slots[: plan.num_decodes]]
            token_ids = np.concatenate((decodes, plan.token_ids)).astype(np.int64)
            positions, token_slots = before[rows] + offsets, slots[rows]
        if shape.samples_each_token:
            logit_index, sampling, new_positions = None, slots, seq_lens
        else:
            last = shape.query_start[1:][shape.rows] - 1
            logit_index = torch.from_numpy(last.astype(np.int64))
            sampling, new_positions = slots[shape.rows], seq_lens[shape.rows]
        return StepInputs(
            token_ids=torch.from_numpy(token_ids),
            positions=torch.from_numpy(positions),
            groups=self._groups(shape, seq_lens, positions, token_slots),
            rows=SamplingRows(
                shape.rows,
                sampling,
                torch.from_numpy(sampling.astype(np.int64)),
                torch.from_numpy(new_positions.astype(np.int64)),
            ),
            logit_index=logit_index,
        )

    def _groups(
        self, shape: _Shape, seq_lens: I32, positions: I64, token_slots: I32
    ) -> tuple[GroupInputs, ...]:
        query_start, lengths = torch.from_numpy(shape.query_start), torch.from_numpy(seq_lens)
        size = self._block_size
        block, offset = np.divmod(positions, size)
        width = -(-max(shape.host_seq_lens) // size)
        groups = []
        for table, split in zip(self._tables, self._split, strict=True):
            mapping = table[token_slots, block].astype(np.int64) * size + offset
            rows = torch.from_numpy(table[:, :width][shape.plan.slots])
            groups.append(shape.group(torch.from_numpy(mapping), query_start, lengths, rows, split))
        return tuple(groups)


class DeviceInputMaker:
    """Makes inputs where the state is the device's: one copy there, then two small kernels."""

    def __init__(
        self,
        state: SlotState,
        kernels: RunnerKernels,
        split: tuple[bool, ...],
        transfer: HostDeviceTransfer,
    ) -> None:
        """`split` says of each cache group whether mixed steps are needed in two parts."""
        assert kernels.advance is not None and kernels.map is not None, (
            "they are asked for on a device"
        )
        self._state, self._advance, self._map = state, kernels.advance, kernels.map
        self._split = split
        self._transfer = transfer

    def make(self, plan: StepPlan) -> StepInputs:
        """Apply a plan's deltas, move lengths on, and return the inputs. The plan has at least one row."""
        shape, state = _Shape.of(plan), self._state
        words, values = state.layout.writes(plan)
        token_rows, offsets = shape.token_rows()
        slots, middle = plan.slots.astype(np.int64), plan.num_decodes
        sampling = plan.slots[shape.rows]
        sent = self._transfer.send(
            (
                words,
                values,
                slots,
                slots[token_rows],
                plan.num_computed_tokens[token_rows] + offsets,
                np.concatenate((np.zeros(middle, np.int64), plan.token_ids)),
                plan.num_query_tokens,
                shape.query_start,
                shape.rows.astype(np.int64),
                (shape.query_start[1:][shape.rows] - 1).astype(np.int64),
            )
        )
        *changes, device_slots, token_slots, positions, ids, advance, query_start, sampled, last = (
            sent
        )
        seq_lens, ends = torch.empty_like(advance), torch.empty_like(device_slots)
        self._advance(
            state.words,
            *changes,
            device_slots,
            advance,
            ids[:middle],
            positions[:middle],
            seq_lens,
            ends,
            *state.layout.heads,
        )
        return StepInputs(
            token_ids=ids,
            positions=positions,
            groups=self._groups(shape, query_start, seq_lens, device_slots, positions, token_slots),
            rows=SamplingRows(shape.rows, sampling, device_slots[sampled], ends[sampled]),
            logit_index=None if shape.samples_each_token else last,
        )

    def _groups(
        self,
        shape: _Shape,
        query_start: torch.Tensor,
        seq_lens: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        token_slots: torch.Tensor,
    ) -> tuple[GroupInputs, ...]:
        groups = []
        for table, split in zip(self._state.tables, self._split, strict=True):
            gathered, mapping = (
                table.new_empty((len(slots), table.shape[1])),
                torch.empty_like(positions),
            )
            self._map(table, slots, token_slots, positions, gathered, mapping)
            groups.append(shape.group(mapping, query_start, seq_lens, gathered, split))
        return tuple(groups)
