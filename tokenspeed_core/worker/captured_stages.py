"""The stages of a captured step, which its graphs record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tokenspeed_core.api.models import Model
from tokenspeed_core.api.parallel import TokenCounts
from tokenspeed_core.worker.attention import AttentionGroup
from tokenspeed_core.worker.captured_inputs import SharedBuffers
from tokenspeed_core.worker.captured_step import Bucket
from tokenspeed_core.worker.draft_model import DraftRunner
from tokenspeed_core.worker.inputs import begin_step
from tokenspeed_core.worker.sampler import RunnerKernels, draw
from tokenspeed_core.worker.slots import SlotFlags, SlotState
from tokenspeed_core.worker.transfer import HostDeviceTransfer


@dataclass(frozen=True, slots=True, eq=False)
class GraphContext:
    """The parts of the worker that captured steps use."""

    state: SlotState
    flags: SlotFlags
    groups: Sequence[AttentionGroup]
    model: Model
    drafter: DraftRunner | None
    kernels: RunnerKernels
    transfer: HostDeviceTransfer
    token_counts: TokenCounts
    num_engines: int  # that share experts
    block_size: int
    max_model_len: int
    max_drafts: int


class StepStages:
    """The stages of all buckets: `begin` and `forward`, then `keep` the logits, then `draw` from them."""

    def __init__(self, context: GraphContext, buffers: SharedBuffers) -> None:
        """`buffers` are those that the buckets share."""
        self._context, self._buffers = context, buffers

    def begin(self, bucket: Bucket) -> None:
        """Update the state of the slots, and compute the inputs."""
        context = self._context
        begin_step(
            context.state, context.kernels, bucket.columns, bucket.layout.size, bucket.buffers
        )

    def forward(self, bucket: Bucket) -> None:
        """Run the model, and choose tokens greedily."""
        model, buffers = self._context.model, bucket.buffers
        wanted = bucket.columns.get("last")
        drafter = self._context.drafter
        if bucket.padding is not None:
            self._context.token_counts.padding = bucket.padding.find()
        if drafter is None or not bucket.layout.has_draft_model:
            hidden = model.forward(buffers.token_ids, buffers.positions, wanted)
        else:
            hidden, bucket.own_states = drafter.read(
                model, buffers.token_ids, buffers.positions, wanted
            )
        self._context.token_counts.padding = None
        logits = model.logits(hidden)
        bucket.own_logits = logits
        self._note(bucket, logits, self._context.kernels.greedy[logits.dtype](logits))

    def keep(self, bucket: Bucket) -> None:
        """Copy the logits to a buffer that the next step overwrites."""
        logits, buffers = bucket.own_logits, self._buffers
        if buffers.logits is None:
            buffers.logits = logits.new_empty((len(buffers.ids), logits.shape[1]))
        bucket.kept_logits = buffers.logits[: len(logits)]
        bucket.kept_logits.copy_(logits)

    def draw(self, bucket: Bucket) -> None:
        """Replace the greedy tokens by tokens sampled from the kept logits with the parameters of the slots."""
        context, logits = self._context, bucket.kept_logits
        new_positions = bucket.buffers.new_positions
        chosen = draw(context.state, context.kernels.sample, logits, bucket.slots, new_positions)
        self._note(bucket, logits, chosen)

    def choose_again(self, bucket: Bucket, draws: bool) -> None:
        """Choose from the bucket's kept logits, which were changed after its last launch."""
        if draws:
            bucket.draw_graph.replay()
        else:
            logits = bucket.kept_logits
            self._note(bucket, logits, self._context.kernels.greedy[logits.dtype](logits))

    def _note(self, bucket: Bucket, logits: torch.Tensor, chosen: torch.Tensor) -> None:
        state = self._context.state
        note = self._context.kernels.note[logits.dtype]
        note(logits, chosen, bucket.slots, state.last_token, bucket.ids)
        if bucket.drafts is not None:
            places = self._buffers.places[: len(bucket.ids)]
            token_ids = bucket.buffers.token_ids
            verify = self._context.kernels.verify
            bucket.drafts.verify(verify, token_ids, places, bucket.ids, state, bucket.num_new)
