"""A draft model on the device: it runs after each step of the target, and drafts tokens for the next one.

After a step's tokens were chosen, the draft model computes its cache entries for the step's query tokens, with the same
block tables and the same attention inputs. So its cache covers the same tokens as the target's, and prefix hits, chunks,
preemption and rejected drafts need no extra code. Then it runs once for each further draft token, with one query token
per row. The draft tokens stay in the state of the slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tokenspeed_core.api.attention import AttentionStep
from tokenspeed_core.api.models import (
    CapturingModel,
    DraftModel,
    DraftModelInfo,
    HiddenStates,
    Model,
)
from tokenspeed_core.api.step import I32, NextDrafts, StepPlan
from tokenspeed_core.worker.attention import AttentionGroup
from tokenspeed_core.worker.inputs import GroupInputs, StepInputs
from tokenspeed_core.worker.sampler import RunnerKernels, SamplingRows, draw
from tokenspeed_core.worker.slots import DRAWS, SlotFlags, SlotState
from tokenspeed_core.worker.transfer import HostDeviceTransfer


@dataclass(frozen=True, slots=True, eq=False)
class DraftContext:
    """The parts of the worker that a draft model uses.

    `groups` are all cache groups, and `is_used` says which of them hold layers of the draft model.
    """

    state: SlotState
    flags: SlotFlags
    groups: Sequence[AttentionGroup]
    is_used: Sequence[bool]
    kernels: RunnerKernels
    transfer: HostDeviceTransfer
    block_size: int
    max_model_len: int


@dataclass(frozen=True, slots=True, eq=False)
class TargetStep:
    """A step of the target model, until the draft model follows it. `states` are those of `DraftModelInfo.hidden`."""

    plan: StepPlan
    next: NextDrafts
    inputs: StepInputs
    states: torch.Tensor | None


class DraftRunner:
    """Runs a draft model after steps of its target."""

    def __init__(self, model: DraftModel, info: DraftModelInfo, context: DraftContext) -> None:
        """Keep the model and its context. `padding` is set together with the arena."""
        self._model, self._info, self._context = model, info, context
        self.padding: Sequence[int] = ()  # the padding block of each group

    def read(
        self, target: Model, inputs: StepInputs, wanted: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the target. Returns the hidden states of `wanted`, and those that the draft model reads."""
        token_ids, positions = inputs.token_ids, inputs.positions
        match self._info.hidden:
            case HiddenStates.NONE:
                return target.forward(token_ids, positions, wanted), None
            case HiddenStates.LAST:
                hidden = states = target.forward(token_ids, positions, None)
            case HiddenStates.LAYERS:
                assert isinstance(target, CapturingModel), "checked when the model was built"
                hidden, states = target.forward_and_capture(token_ids, positions, self._info.layers)
        return hidden if wanted is None else hidden[wanted], states

    def follow(
        self, step: TargetStep, ids: torch.Tensor | None, num_new: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Compute the cache entries of a step, and draft tokens for the next one, int32 [S, num_drafts] if any.

        `ids` int32 [R] are the chosen tokens and `num_new` int32 [S] the new tokens of each row that samples, as in
        `Sampled`; `ids` is None if no row does.
        """
        rows = step.inputs.rows
        newest = _newest(rows, num_new) if ids is not None else None
        hidden = self._extend(step, ids, newest)
        num_drafts = step.next.num_drafts
        if newest is None or not num_drafts:
            return None
        state = self._context.state
        slots = rows.device_slots if rows.drafts is None else rows.drafts.slots
        plan_rows = rows.plan_rows if rows.drafts is None else rows.drafts.host.rows
        decodes = _Decodes(self._context, self.padding, step, slots, plan_rows)
        lengths = state.seq_len[slots].to(torch.int64)
        draws = bool(self._context.flags.asked(rows.slots) & DRAWS)
        token = state.last_token[slots].to(torch.int64)
        drafts: list[torch.Tensor] = []
        # The token at position p is drafted from the hidden state of position p - 1, or from the token there.
        offset = 0 if hidden is None else -1
        if hidden is not None:
            token = self._choose(hidden, slots, lengths + 1, draws=draws)
            drafts.append(token)
        while len(drafts) < num_drafts:
            positions = decodes.begin(lengths + (offset + len(drafts)))
            hidden = self._model.forward(token, positions, None if offset == 0 else hidden, None)
            token = self._choose(hidden, slots, lengths + (1 + len(drafts)), draws=draws)
            drafts.append(token)
        made = torch.stack(drafts, dim=1).to(torch.int32)
        state.drafts[:, :num_drafts].index_copy_(0, slots, made)
        return made

    def _extend(
        self, step: TargetStep, ids: torch.Tensor | None, newest: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Compute the cache entries of the step's query tokens.

        Returns the hidden states of the tokens `newest`, None for a model that reads tokens only.
        """
        inputs = step.inputs
        if newest is None:  # nothing is wanted, and a model computes at least one row
            newest = inputs.positions.new_zeros(1)
        if step.states is None:
            self._model.forward(inputs.token_ids, inputs.positions, None, newest)
            return None
        following = self._following(step, ids)
        hidden = self._model.begin(step.states)
        return self._model.forward(following, inputs.positions, hidden, newest)

    def _following(self, step: TargetStep, ids: torch.Tensor | None) -> torch.Tensor:
        """Return the token after each query token, int64 [T]; any token after rejected draft tokens."""
        plan, inputs = step.plan, step.inputs
        following = inputs.token_ids.roll(-1)
        chunks = np.arange(plan.num_decodes, plan.num_rows)
        goes_on = ~plan.wants_logits[chunks]
        if goes_on.any():
            ends = np.cumsum(plan.num_query_tokens)[chunks[goes_on]] - 1
            places, tokens = self._context.transfer.send(
                (ends.astype(np.int64), step.next.following[goes_on].astype(np.int64))
            )
            following.index_copy_(0, places, tokens)
        if ids is not None:
            chosen = ids.to(torch.int64).clamp_(min=0)
            if inputs.logit_index is None:
                following[: len(chosen)] = chosen
            else:
                following.index_copy_(0, inputs.logit_index, chosen)
        return following

    def _choose(
        self, hidden: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, *, draws: bool
    ) -> torch.Tensor:
        """Return draft tokens int64 [S] for their positions.

        A row that draws uses the random number with which the target will choose its token there, which makes equal
        choices more likely.
        """
        context, logits = self._context, self._model.logits(hidden)
        chosen: torch.Tensor
        if draws:
            chosen = draw(context.state, context.kernels.sample, logits, slots, positions)
        else:
            chosen = context.kernels.greedy[logits.dtype](logits)
        # Without a finite logit a kernel may return anything.
        return chosen.to(torch.int64).clamp_(0, logits.shape[1] - 1)


def _newest(rows: SamplingRows, num_new: torch.Tensor | None) -> torch.Tensor:
    """Return the last query token of each row that is kept, int64 [S] among the step's tokens."""
    if rows.drafts is None:
        if rows.last is None:
            return torch.arange(len(rows.slots), device=rows.device_slots.device)
        return rows.last
    assert num_new is not None and rows.last is not None, "drafts were verified"
    return rows.last[rows.drafts.first + num_new - 1]


class _Decodes:
    """Passes with one query token for each of S slots."""

    def __init__(
        self,
        context: DraftContext,
        padding: Sequence[int],
        step: TargetStep,
        slots: torch.Tensor,
        plan_rows: I32 | np.ndarray[tuple[int], np.dtype[np.int64]],
    ) -> None:
        plan, num = step.plan, len(slots)
        self._context, self._slots = context, slots
        lengths = plan.num_computed_tokens[plan_rows] + plan.num_query_tokens[plan_rows]
        most = np.minimum(lengths + step.next.num_drafts, context.max_model_len)
        self._host_seq_lens: tuple[int, ...] = tuple(most.tolist())
        self._max_seq_len = int(most.max())
        (self._capacity,) = context.transfer.send((step.next.capacity[plan_rows].astype(np.int64),))
        self._query_start = torch.arange(num + 1, dtype=torch.int32, device=slots.device)
        width = context.state.layout.num_blocks
        if slots.device.type == "cpu":  # kernels there read whole tables
            width = -(-self._max_seq_len // context.block_size)
        self._tables = [
            (group, table[:, :width], block)
            for group, table, block, is_used in zip(
                context.groups, context.state.tables, padding, context.is_used, strict=True
            )
            if is_used
        ]

    def begin(self, positions: torch.Tensor) -> torch.Tensor:
        """Prepare attention for tokens at `positions` int64 [S]. Return the positions, clamped to `max_model_len`."""
        context, slots = self._context, self._slots
        positions = positions.clamp(max=context.max_model_len - 1)
        seq_lens = (positions + 1).to(torch.int32)
        num = len(slots)
        for group, table, padding in self._tables:
            block_table = table.new_empty((num, table.shape[1]))
            kv_slots = slots.new_empty(num)
            context.kernels.map(table, slots, slots, positions, block_table, kv_slots)
            # Entries of a table beyond its capacity may be blocks of other sequences.
            kv_slots = torch.where(
                positions < self._capacity, kv_slots, padding * context.block_size
            )
            step = AttentionStep(
                num_rows=num,
                num_tokens=num,
                max_num_query=1,
                max_seq_len=self._max_seq_len,
                query_start=self._query_start,
                seq_lens=seq_lens,
                block_table=block_table,
                host_query_start=tuple(range(num + 1)),
                host_seq_lens=self._host_seq_lens,
            )
            group.begin(GroupInputs(kv_slots, step, num, None, None))
        return positions
