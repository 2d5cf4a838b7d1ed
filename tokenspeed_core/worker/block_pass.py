"""The pass of a draft model that drafts whole blocks: all draft tokens of all rows at once.

Attention backends are causal. Here each token of a block is a row with one query token, whose length ends after the
block. So it attends to the whole block, with the kernels for decodes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tokenspeed_core.api.attention import AttentionStep
from tokenspeed_core.api.models import BlockDraftModel
from tokenspeed_core.worker.draft_passes import DraftContext, PassBounds
from tokenspeed_core.worker.inputs import GroupInputs
from tokenspeed_core.worker.sampler import draw

# Rows of logits per call, unless a step has more rows. It bounds their memory.
_MAX_LOGITS = 1024


class BlockPass:
    """The pass of S rows with blocks of N tokens: `start`, then `begin`, `prepare` and `forward` once.

    The methods and their order are those of `DraftPasses`.
    """

    def __init__(
        self,
        context: DraftContext,
        model: BlockDraftModel,
        mask_token_id: int,
        bounds: PassBounds,
        padding: Sequence[int],
    ) -> None:
        """Allocate the buffers. `padding` is the padding block of each cache group."""
        self._context, self._model = context, model
        num_rows, state = bounds.num_rows, context.state
        device, num_drafts = state.words.device, state.layout.max_drafts
        self._num_drafts = num_drafts
        shape = (num_rows, 1 + num_drafts)
        self._slots, self._positions, self._capacity = (
            torch.empty(shape, dtype=torch.int64, device=device) for _ in range(3)
        )
        self._token_ids = torch.full(shape, mask_token_id, device=device)
        self._seq_lens = torch.empty(shape, dtype=torch.int32, device=device)
        self._next = torch.empty(num_rows, dtype=torch.int64, device=device)
        self._offsets = torch.arange(shape[1], device=device)
        num_tokens = self._slots.numel()
        query_start = torch.arange(num_tokens + 1, dtype=torch.int32, device=device)
        lengths = bounds.host_seq_lens
        self._groups = []
        for index, group in context.groups:
            table = state.tables[index][:, : bounds.table_width]
            block_table = table.new_empty((num_tokens, table.shape[1]))
            kv_slots = torch.empty(num_tokens, dtype=torch.int64, device=device)
            step = AttentionStep(
                num_rows=num_tokens,
                num_tokens=num_tokens,
                max_num_query=1,
                max_seq_len=bounds.max_seq_len,
                query_start=query_start,
                seq_lens=self._seq_lens.view(-1),
                block_table=block_table,
                host_query_start=None if lengths is None else tuple(range(num_tokens + 1)),
                host_seq_lens=None
                if lengths is None
                else tuple(length for length in lengths for _ in range(shape[1])),
            )
            inputs = GroupInputs(kv_slots, step, num_tokens, None, None)
            self._groups.append((group, table, inputs, padding[index] * context.block_size))

    def num_passes(self, num_drafts: int) -> int:
        """Return how many passes make that many draft tokens."""
        return 1 if num_drafts else 0

    def start(
        self,
        slots: torch.Tensor,
        capacity: torch.Tensor,
        hidden: torch.Tensor | None,
        *,
        draws: bool,
    ) -> None:
        """Begin after the newest token of each row, as `DraftPasses.start` does for a model that reads tokens only."""
        state = self._context.state
        self._slots.copy_(slots[:, None])
        self._capacity.copy_(capacity.clamp(max=self._context.max_model_len)[:, None])
        self._next.copy_(state.seq_len[slots])
        self._token_ids[:, 0].copy_(state.last_token[slots])

    def begin(self) -> None:
        """Compute the positions of the blocks, their lengths, and where their cache entries go.

        Beyond a row's capacity, its table may hold blocks of other sequences. Entries there go to the padding block, and
        no token attends to them.
        """
        context = self._context
        places = self._next[:, None] + self._offsets
        torch.clamp(places, max=context.max_model_len - 1, out=self._positions)
        is_behind = (places >= self._capacity).view(-1)
        ends = torch.minimum(places[:, -1:] + 1, self._capacity).clamp_(min=1)
        self._seq_lens.copy_(ends)
        slots, positions = self._slots.view(-1), self._positions.view(-1)
        for _, table, inputs, padding in self._groups:
            context.kernels.map(
                table, slots, slots, positions, inputs.step.block_table, inputs.kv_slots
            )
            inputs.kv_slots.masked_fill_(is_behind, padding)

    def prepare(self) -> None:
        """Prepare attention for the pass."""
        for group, _, inputs, _ in self._groups:
            group.begin(inputs)

    def forward(self, *, draws: bool) -> None:
        """Run the model, and choose all draft tokens."""
        num_rows, num_tokens = self._positions.shape
        hidden = self._model.forward_block(self._token_ids.view(-1), self._positions.view(-1))
        hidden = hidden.view(num_rows, num_tokens, -1)
        per_call = max(1, _MAX_LOGITS // num_rows)
        for first in range(0, self._num_drafts, per_call):
            last = min(first + per_call, self._num_drafts)
            self._choose(hidden[:, 1 + first : 1 + last], first, draws=draws)

    def _choose(self, hidden: torch.Tensor, first: int, *, draws: bool) -> None:
        """Choose draft tokens from hidden states [S, N, H], and keep them in the slots' state from `first` on.

        A row that draws uses the random numbers with which the target will choose its tokens there.
        """
        context, num_tokens = self._context, hidden.shape[1]
        logits = self._model.logits(hidden.flatten(0, 1))
        context.check(logits)
        slots = self._slots[:, :num_tokens]
        places = self._offsets[first : first + num_tokens]
        if draws:
            positions = (self._next[:, None] + places + 1).view(-1)
            chosen = draw(
                context.state, context.kernels.sample, logits, slots.reshape(-1), positions
            )
        else:
            chosen = context.kernels.greedy[logits.dtype](logits)
        # Without a finite logit a kernel may return anything.
        ids = torch.clamp(chosen, 0, logits.shape[1] - 1).to(torch.int32)
        words = slots * context.state.layout.max_drafts + places
        context.state.drafts.view(-1).index_copy_(0, words.view(-1), ids)
