"""A draft model on the device: it runs after each step of the target, and drafts tokens for the next one.

After a step's tokens were chosen, the draft model computes its cache entries for the step's query tokens, with the same
block tables and the same attention inputs. So its cache covers the same tokens as the target's, and prefix hits, chunks,
preemption and rejected drafts need no extra code. Then it runs once for each further draft token, with one query token
per row; a model that drafts blocks runs once for all draft tokens. The draft tokens stay in the state of the slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch

from tokenspeed_core.api.models import (
    BlockDraftModel,
    CapturingModel,
    DraftModel,
    DraftModelInfo,
    HiddenStates,
    Model,
)
from tokenspeed_core.api.step import I64, NextDrafts, StepPlan
from tokenspeed_core.worker.block_pass import BlockPass
from tokenspeed_core.worker.draft_passes import DraftContext, DraftPasses, PassBounds
from tokenspeed_core.worker.inputs import StepInputs
from tokenspeed_core.worker.sampler import SamplingRows
from tokenspeed_core.worker.slots import DRAWS, SlotFlags
from tokenspeed_core.worker.transfer import HostDeviceTransfer


@dataclass(frozen=True, slots=True, eq=False)
class TargetStep:
    """A step of the target model, kept until the draft model runs. `states` are the hidden states of `DraftModelInfo.hidden`."""

    plan: StepPlan
    next: NextDrafts
    inputs: StepInputs
    states: torch.Tensor | None


class DraftRunner:
    """Runs a draft model after steps of its target."""

    def __init__(
        self,
        info: DraftModelInfo,
        model: DraftModel | BlockDraftModel,
        context: DraftContext,
        flags: SlotFlags,
        transfer: HostDeviceTransfer,
    ) -> None:
        """Keep the model and its context. `padding` is set together with the arena."""
        self._info, self._context = info, context
        self._mask_token_id = info.mask_token_id
        # One of the two is set.
        self._model: DraftModel | None = None
        self._block_model: BlockDraftModel | None = None
        if info.mask_token_id is None:
            self._model = cast(DraftModel, model)
        else:
            self._block_model = cast(BlockDraftModel, model)
        self._flags, self._transfer = flags, transfer
        self.padding: Sequence[int] = ()  # the padding block of each cache group

    def read(
        self,
        target: Model,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        wanted: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the target. Returns the hidden states of `wanted`, and those that the draft model reads."""
        match self._info.hidden:
            case HiddenStates.NONE:
                return target.forward(token_ids, positions, wanted), None
            case HiddenStates.LAST:
                hidden = states = target.forward(token_ids, positions, None)
            case HiddenStates.LAYERS:
                assert isinstance(target, CapturingModel), "checked when the model was built"
                hidden, states = target.forward_and_capture(token_ids, positions, self._info.layers)
        return hidden if wanted is None else hidden[wanted], states

    def extend(
        self,
        token_ids: torch.Tensor,
        following: torch.Tensor,
        positions: torch.Tensor,
        states: torch.Tensor | None,
        newest: torch.Tensor,
    ) -> torch.Tensor | None:
        """Compute the cache entries of a step's query tokens.

        `token_ids` int64 [T] have the `positions` int64 [T], and `following` int64 [T] come after them. `states` are
        those of `read`. Returns the hidden states of the tokens `newest`, None for a model that reads tokens only or drafts
        blocks.
        """
        if self._block_model is not None:
            assert states is not None, "a model that drafts blocks reads hidden states"
            self._block_model.write_context(states, positions)
            return None
        model = self._model
        assert model is not None, "a draft model is of one of the two kinds"
        if states is None:
            model.forward(token_ids, positions, None, newest)
            return None
        return model.forward(following, positions, model.begin(states), newest)

    def passes(self, bounds: PassBounds) -> DraftPasses | BlockPass:
        """Return the passes of some rows after `extend`."""
        if self._block_model is None:
            assert self._model is not None, "a draft model is of one of the two kinds"
            return DraftPasses(self._context, self._model, bounds, self.padding)
        assert self._mask_token_id is not None, "a model that drafts blocks has a mask token"
        return BlockPass(
            self._context, self._block_model, self._mask_token_id, bounds, self.padding
        )

    def draws(self, rows: SamplingRows) -> bool:
        """Return whether draft tokens of some rows are drawn."""
        return bool(self._flags.asked(rows.slots) & DRAWS)

    def drafts(self, slots: torch.Tensor, num_drafts: int) -> torch.Tensor:
        """Return the draft tokens of some slots, int32 [S, num_drafts]."""
        return self._context.state.drafts[slots, :num_drafts]

    def follow(
        self, step: TargetStep, ids: torch.Tensor | None, num_new: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Compute the cache entries of a step, and draft tokens for the next step. Return the draft tokens if requested.

        `ids` int32 [R] are the chosen tokens and `num_new` int32 [S] the new tokens of each row that samples, as in
        `Sampled`; `ids` is None if no row does. The result is int32 [S, num_drafts].
        """
        inputs, rows = step.inputs, step.inputs.rows
        if ids is None:  # nothing is wanted, and a model computes at least one row
            newest = inputs.positions.new_zeros(1)
        else:
            newest = _newest(rows, num_new)
        following = self._following(step, ids)
        hidden = self.extend(inputs.token_ids, following, inputs.positions, step.states, newest)
        num_drafts = step.next.num_drafts
        if ids is None or not num_drafts:
            return None
        slots = rows.device_slots if rows.drafts is None else rows.drafts.slots
        plan_rows = rows.plan_rows if rows.drafts is None else rows.drafts.host.rows
        (capacity,) = self._transfer.send((step.next.capacity[plan_rows].astype(np.int64),))
        passes = self.passes(self._bounds(step, plan_rows.astype(np.int64)))
        draws = self.draws(rows)
        passes.start(slots, capacity, hidden, draws=draws)
        for _ in range(passes.num_passes(num_drafts)):
            passes.begin()
            passes.prepare()
            passes.forward(draws=draws)
        return self.drafts(slots, num_drafts) if step.next.returns_ids else None

    def _bounds(self, step: TargetStep, rows: I64) -> PassBounds:
        """Return the bounds of passes of some rows of a plan."""
        context, plan = self._context, step.plan
        lengths = plan.num_computed_tokens[rows] + plan.num_query_tokens[rows]
        num_ahead = step.next.num_drafts
        if self._block_model is not None:
            num_ahead = 1 + context.state.layout.max_drafts
        most = np.minimum(lengths + num_ahead, context.max_model_len)
        max_seq_len, width = int(most.max()), context.state.layout.num_blocks
        if context.state.words.device.type == "cpu":  # kernels there read whole tables
            width = -(-max_seq_len // context.block_size)
        return PassBounds(len(rows), max_seq_len, width, tuple(most.tolist()))

    def _following(self, step: TargetStep, ids: torch.Tensor | None) -> torch.Tensor:
        """Return the token after each query token, int64 [T]; any token after rejected draft tokens."""
        plan, inputs = step.plan, step.inputs
        following = inputs.token_ids.roll(-1)
        chunks = np.arange(plan.num_decodes, plan.num_rows)
        goes_on = ~plan.wants_logits[chunks]
        if goes_on.any():
            ends = np.cumsum(plan.num_query_tokens)[chunks[goes_on]] - 1
            places, tokens = self._transfer.send(
                (ends.astype(np.int64), step.next.following[goes_on].astype(np.int64))
            )
            following.index_copy_(0, places, tokens)
        if ids is not None:
            chosen = ids.to(torch.int64).clamp_(min=0)
            if inputs.rows.last is None:
                following[: len(chosen)] = chosen
            else:
                following.index_copy_(0, inputs.rows.last, chosen)
        return following


def _newest(rows: SamplingRows, num_new: torch.Tensor | None) -> torch.Tensor:
    """Return the last query token of each row that is kept, int64 [S] among the step's tokens."""
    if rows.drafts is None:
        if rows.last is None:
            return torch.arange(len(rows.slots), device=rows.device_slots.device)
        return rows.last
    assert num_new is not None and rows.last is not None, "drafts were verified"
    return rows.last[rows.drafts.first + num_new - 1]
