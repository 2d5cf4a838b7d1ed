"""Paged attention in plain torch: gather the blocks of each layer, then call scaled_dot_product_attention.

That function supports neither soft caps nor sinks, so layers with them compute the softmax here.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from tokenspeed_core.api import AttentionLimits, AttentionProblem, AttentionStep
from tokenspeed_kernels.reference.cache import as_bytes

MAX_MASKED_QUERIES = 1024  # queries of a prompt per call, which bounds the size of the mask
Positions = TypeVar("Positions", int, Tensor)
MAX_SCORES = 2**25  # scores per call, unless one query has more


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    """Rows that one call of scaled_dot_product_attention handles.

    `blocks` [rows * num_blocks] are gathered and cut to `length` keys per row. `unwritten` are indices of gathered
    tokens that no step has written, so their memory may hold anything. `mask` is added to the scores. Without a mask,
    `causal` applies causal masking aligned to the last key.
    """

    is_decode: bool
    tokens: slice
    num_rows: int
    length: int
    blocks: Tensor
    unwritten: Tensor | None
    mask: Tensor | None
    causal: bool


class TorchAttention:
    """The reference attention backend: any head size, block size, window and mix of rows.

    `prepare` reads lengths back from the device, so it cannot run in CUDA graphs.
    """

    takes_drafts = True

    def __init__(
        self, problem: AttentionProblem, limits: AttentionLimits, device: torch.device
    ) -> None:
        del limits
        if problem.num_heads % problem.num_kv_heads:
            raise ValueError(
                f"num_heads ({problem.num_heads}) is not a multiple of num_kv_heads ({problem.num_kv_heads})"
            )
        self._problem = problem
        self._device = device
        self._is_plain = problem.soft_cap is None and not problem.has_sinks
        self._dtype: torch.dtype = (
            getattr(torch, problem.dtype) if self._is_plain else torch.float32
        )
        self._gathered = [torch.empty(0, device=device) for _ in range(2)]
        self._batches: list[_Batch] = []
        self._idle: list[slice] = []

    def prepare(self, step: AttentionStep) -> None:
        """Split the step into batches. Leading one-token rows of similar length form one batch."""
        starts = step.query_start[: step.num_rows + 1].tolist()
        lens = step.seq_lens[: step.num_rows].tolist()
        num_queries = [end - start for start, end in pairwise(starts)]
        num_decodes = next(
            (i for i, n in enumerate(num_queries) if n != 1 or lens[i] == 0), len(lens)
        )
        if (
            num_decodes > 1
            and max(lens[:num_decodes]) * num_decodes > 2 * sum(lens[:num_decodes]) + 4096
        ):
            num_decodes = 0
        self._batches, self._idle = [], []
        if num_decodes:
            self._batches.append(self._decodes(step, lens[:num_decodes]))
        for row in range(num_decodes, len(lens)):
            if lens[row] == 0:
                self._idle.append(slice(starts[row], starts[row + 1]))
            elif num_queries[row]:
                self._batches += self._row(
                    step.block_table[row], starts[row], num_queries[row], lens[row]
                )

    def forward(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        out: Tensor,
        sinks: Tensor | None = None,
    ) -> None:
        """Attend batch by batch.

        Padding rows get zeros. q [T, H, D], out [T, H, V]; caches [B, block_size, K, D or V].
        """
        for tokens in self._idle:
            out[tokens] = 0.0
        for batch in self._batches:
            k, v = self._gather(0, k_cache, batch), self._gather(1, v_cache, batch)
            attend = self._attend_rows if batch.is_decode else self._attend_row
            attend(q[batch.tokens], k, v, out[batch.tokens], batch, sinks)

    def _decodes(self, step: AttentionStep, lens: list[int]) -> _Batch:
        """Plan rows with one query each as one padded batch."""
        size, num_rows = self._problem.block_size, len(lens)
        first = [self._first_block(length - 1) for length in lens]
        count = [-(-length // size) - skipped for length, skipped in zip(lens, first, strict=True)]
        num_blocks = max(count)
        if min(lens) == max(lens) and self._problem.window is None:
            table = step.block_table[:num_rows, :num_blocks]
            return _Batch(
                True, slice(0, num_rows), num_rows, lens[0], table.flatten(), None, None, False
            )
        columns = torch.tensor([first, count, lens], device=self._device).unsqueeze(-1)
        block = torch.arange(num_blocks, device=self._device)
        # Rows with fewer blocks repeat their first one.
        block = columns[0] + torch.where(block < columns[1], block, 0)
        source = (block.unsqueeze(-1) * size + torch.arange(size, device=self._device)).flatten(1)
        seen = columns[0] * size + torch.arange(num_blocks * size, device=self._device)
        hidden = seen >= columns[2]
        if self._problem.window is not None:
            hidden |= seen < self._first_seen(columns[2] - 1)
        unwritten = (source >= columns[2]).flatten().nonzero().squeeze(1)
        return _Batch(
            is_decode=True,
            tokens=slice(0, num_rows),
            num_rows=num_rows,
            length=num_blocks * size,
            blocks=step.block_table[:num_rows].gather(1, block).flatten(),
            unwritten=unwritten if unwritten.numel() else None,
            mask=self._mask(hidden)[:, None, None],
            causal=False,
        )

    def _row(self, table: Tensor, start: int, num_queries: int, length: int) -> list[_Batch]:
        """Plan one row. Its queries are chunked if a mask or scores are stored."""
        size, window = self._problem.block_size, self._problem.window
        num_later = 0  # number of keys after its own position that a query sees
        if self._problem.is_bidirectional and num_queries == length:
            num_later = length if window is None else window - 1
        needs_mask = window is not None or num_queries not in (1, length) or not self._is_plain
        chunks = [(0, num_queries)]
        if needs_mask:
            most = MAX_MASKED_QUERIES
            if not self._is_plain:
                most = min(most, max(1, MAX_SCORES // (self._problem.num_heads * length)))
            chunks = list(pairwise([*range(0, num_queries, most), num_queries]))
        planned = []
        for begin, end in chunks:
            first_query = length - num_queries + begin
            after_last = first_query + end - begin
            stop = min(length, after_last + num_later)
            skipped = self._first_block(first_query)
            keys = torch.arange(skipped * size, stop, device=self._device)
            mask = None
            if needs_mask:
                query = torch.arange(first_query, after_last, device=self._device).unsqueeze(1)
                hidden = keys > query + num_later
                if window is not None:
                    hidden |= keys < self._first_seen(query)
                mask = self._mask(hidden)
            planned.append(
                _Batch(
                    is_decode=False,
                    tokens=slice(start + begin, start + end),
                    num_rows=1,
                    length=stop - skipped * size,
                    blocks=table[skipped : -(-stop // size)],
                    unwritten=None,
                    mask=mask,
                    causal=mask is None and num_queries > 1 and not num_later,
                )
            )
        return planned

    def _first_block(self, query: int) -> int:
        """Return the first block that a query position sees."""
        if self._problem.window is None:
            return 0
        return max(0, self._first_seen(query)) // self._problem.block_size

    def _first_seen(self, query: Positions) -> Positions:
        """Return the first positions that query positions see, if there is a window. They may be negative."""
        window = self._problem.window
        assert window is not None, "without a window all positions are seen"
        return query // window * window if self._problem.is_chunked else query - window + 1

    def _mask(self, hidden: Tensor) -> Tensor:
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(hidden, float("-inf"))

    def _gather(self, which: int, cache: Tensor, batch: _Batch) -> Tensor:
        """Return [rows, length, K, D] gathered from the cache, zero where nothing was written.

        The buffer is kept between calls and grows: allocating fresh pages would cost more than the copy.
        """
        _, size, num_heads, head_size = cache.shape
        num_blocks = batch.blocks.shape[0]
        if self._gathered[which].shape[0] < num_blocks:
            self._gathered[which] = cache.new_empty((num_blocks, size, num_heads, head_size))
        gathered = self._gathered[which][:num_blocks]
        torch.index_select(as_bytes(cache), 0, batch.blocks, out=as_bytes(gathered))
        if batch.unwritten is not None:
            as_bytes(gathered).view(-1, num_heads, head_size).index_fill_(0, batch.unwritten, 0)
        return gathered.view(batch.num_rows, -1, num_heads, head_size)[:, : batch.length].to(
            self._dtype
        )

    def _attend_rows(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, batch: _Batch, sinks: Tensor | None
    ) -> None:
        """Attend for rows with one query. Query heads of a KV head take the place of queries, so no key is repeated."""
        shape = (q.shape[0], self._problem.num_kv_heads, -1, q.shape[2])
        if sinks is not None:
            sinks = sinks.view(1, shape[1], -1, 1)
        attended = self._attend(
            q.view(shape), k.transpose(1, 2), v.transpose(1, 2), batch.mask, sinks, causal=False
        )
        out.view(attended.shape).copy_(attended)

    def _attend_row(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, batch: _Batch, sinks: Tensor | None
    ) -> None:
        """Attend for many queries of one row. Query heads of a KV head form a batch over expanded keys."""
        num_kv_heads = self._problem.num_kv_heads
        num_groups = self._problem.num_heads // num_kv_heads
        k, v = (x.transpose(1, 2).expand(num_groups, -1, -1, -1) for x in (k, v))
        q = q.view(q.shape[0], num_kv_heads, num_groups, -1).permute(2, 1, 0, 3)
        if sinks is not None:
            sinks = sinks.view(num_kv_heads, num_groups, 1, 1).transpose(0, 1)
        attended = self._attend(q, k, v, batch.mask, sinks, causal=batch.causal)
        out.copy_(attended.permute(2, 1, 0, 3).flatten(1, 2))

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        sinks: Tensor | None,
        *,
        causal: bool,
    ) -> Tensor:
        """Attend. q [N, M, Q, D], k [N, M, L, D], v [N, M, L, V]; `mask` and `sinks` broadcast to the scores [N, M, Q, L]."""
        problem = self._problem
        if self._is_plain:
            return functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=causal, scale=problem.scale
            )
        scores = q.float() @ k.transpose(2, 3) * problem.scale
        if problem.soft_cap is not None:
            scores = problem.soft_cap * torch.tanh(scores / problem.soft_cap)
        if mask is not None:
            scores += mask
        num_keys = scores.shape[3]
        if sinks is not None:
            scores = torch.cat((scores, sinks.expand(*scores.shape[:3], 1)), dim=3)
        return scores.softmax(dim=3)[..., :num_keys] @ v


def attention(
    problem: AttentionProblem, limits: AttentionLimits, device: torch.device
) -> TorchAttention:
    """Build the reference backend (an AttentionFactory)."""
    return TorchAttention(problem, limits, device)
