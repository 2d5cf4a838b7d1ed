"""Passes of a draft model with one query token for each row, which make the draft tokens one after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tokenspeed_core.api.attention import AttentionStep
from tokenspeed_core.api.models import DraftModel
from tokenspeed_core.worker.attention import AttentionGroup
from tokenspeed_core.worker.inputs import GroupInputs
from tokenspeed_core.worker.sampler import RunnerKernels, draw
from tokenspeed_core.worker.slots import SlotState


@dataclass(frozen=True, slots=True, eq=False)
class DraftContext:
    """The parts of the worker that a draft model uses.

    `groups` are the indices of the cache groups that hold the draft model's layers among all groups.
    """

    state: SlotState
    groups: Sequence[tuple[int, AttentionGroup]]
    kernels: RunnerKernels
    block_size: int
    max_model_len: int
    vocab_size: int

    def check(self, logits: torch.Tensor) -> None:
        """Raise ValueError unless logits [R, V] have the target's vocabulary and a dtype with kernels."""
        dtypes = self.kernels.greedy
        if logits.shape[1] != self.vocab_size or logits.dtype not in dtypes:
            expected = " or ".join(map(str, dtypes))
            raise ValueError(
                f"the draft model's logits are {logits.dtype} {list(logits.shape)}, expected {expected} "
                f"[rows, {self.vocab_size}]"
            )


@dataclass(frozen=True, slots=True)
class PassBounds:
    """The host's bounds on the passes of a step.

    `table_width` is the number of blocks that a row may have. Captured passes know no lengths of rows.
    """

    num_rows: int
    max_seq_len: int
    table_width: int
    host_seq_lens: tuple[int, ...] | None = None  # upper bounds


class DraftPasses:
    """The passes of S rows: `start`, then for each draft token `begin`, `prepare` and `forward`.

    Captured passes replay these on the same buffers. `prepare` calls attention backends and is not captured if these
    touch the device.
    """

    def __init__(
        self,
        context: DraftContext,
        model: DraftModel,
        bounds: PassBounds,
        padding: Sequence[int],
    ) -> None:
        """Allocate the buffers. `padding` is the padding block of each cache group."""
        self._context, self._model = context, model
        num_rows, device = bounds.num_rows, context.state.words.device
        # Separate buffers, since kernels are compiled for aligned addresses. `next` are the positions of the next pass without
        # a limit, and `words` the places of its draft tokens in the state.
        self._slots, self._capacity, self._next, self._positions, self._words, self._token = (
            torch.empty(num_rows, dtype=torch.int64, device=device) for _ in range(6)
        )
        self._seq_lens = torch.empty(num_rows, dtype=torch.int32, device=device)
        self._hidden: torch.Tensor | None = None
        query_start = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
        self._groups = []
        for index, group in context.groups:
            table = context.state.tables[index][:, : bounds.table_width]
            block_table = table.new_empty((num_rows, table.shape[1]))
            kv_slots = torch.empty(num_rows, dtype=torch.int64, device=device)
            step = AttentionStep(
                num_rows=num_rows,
                num_tokens=num_rows,
                max_num_query=1,
                max_seq_len=bounds.max_seq_len,
                query_start=query_start,
                seq_lens=self._seq_lens,
                block_table=block_table,
                host_query_start=None
                if bounds.host_seq_lens is None
                else tuple(range(num_rows + 1)),
                host_seq_lens=bounds.host_seq_lens,
            )
            inputs = GroupInputs(kv_slots, step, num_rows, None, None)
            self._groups.append((group, table, inputs, padding[index] * context.block_size))

    @property
    def reads_hidden(self) -> bool:
        """Whether the model reads hidden states, so that `start` makes a draft token."""
        return self._hidden is not None

    def num_passes(self, num_drafts: int) -> int:
        """Return how many passes after `start` make that many draft tokens."""
        return num_drafts - 1 if num_drafts and self.reads_hidden else num_drafts

    def start(
        self,
        slots: torch.Tensor,
        capacity: torch.Tensor,
        hidden: torch.Tensor | None,
        *,
        draws: bool,
    ) -> None:
        """Begin after the newest token of each row. The slots have the state after the step.

        `slots` and `capacity` int64 [S] are those of `NextDrafts`. `hidden` [S, H] are the hidden states of the last
        tokens in the cache, from which the first draft tokens are chosen at once; None if the model reads tokens only.
        `draws` says whether a row draws.
        """
        state = self._context.state
        self._slots.copy_(slots)
        self._capacity.copy_(capacity)
        self._next.copy_(state.seq_len[slots])
        torch.mul(slots, state.layout.max_drafts, out=self._words)
        if hidden is None:
            self._token.copy_(state.last_token[slots])
            return
        if self._hidden is None:
            self._hidden = torch.empty_like(hidden)
        self._hidden.copy_(hidden)
        self._choose(hidden, self._next + 1, draws=draws)

    def begin(self) -> None:
        """Compute the positions of the next pass, and where its cache entries go.

        Beyond a row's capacity, its table may hold blocks of other sequences, so entries there go to the padding block.
        """
        context = self._context
        torch.clamp(self._next, max=context.max_model_len - 1, out=self._positions)
        torch.add(self._positions, 1, out=self._seq_lens)
        is_behind = self._positions >= self._capacity
        for _, table, inputs, padding in self._groups:
            slots, block_table = self._slots, inputs.step.block_table
            context.kernels.map(table, slots, slots, self._positions, block_table, inputs.kv_slots)
            inputs.kv_slots.masked_fill_(is_behind, padding)

    def prepare(self) -> None:
        """Prepare attention for the pass."""
        for group, _, inputs, _ in self._groups:
            group.begin(inputs)

    def forward(self, *, draws: bool) -> None:
        """Run the model, and choose the next draft tokens."""
        hidden = self._model.forward(self._token, self._positions, self._hidden, None)
        if self._hidden is not None:
            self._hidden.copy_(hidden)
        self._choose(hidden, self._next + (2 if self.reads_hidden else 1), draws=draws)
        self._next.add_(1)

    def _choose(self, hidden: torch.Tensor, positions: torch.Tensor, *, draws: bool) -> None:
        """Choose draft tokens for positions int64 [S], and keep them in the slots' state.

        A row that draws uses the random number with which the target will choose its token there, which makes equal
        choices more likely.
        """
        context = self._context
        logits = self._model.logits(hidden)
        context.check(logits)
        if draws:
            chosen = draw(context.state, context.kernels.sample, logits, self._slots, positions)
        else:
            chosen = context.kernels.greedy[logits.dtype](logits)
        # Without a finite logit a kernel may return anything.
        torch.clamp(chosen, 0, logits.shape[1] - 1, out=self._token)
        drafts = context.state.drafts.view(-1)
        drafts.index_copy_(0, self._words, self._token.to(torch.int32))
        self._words.add_(1)
