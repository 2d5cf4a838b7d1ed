"""Attention steps with expected outputs: rows of any length over a poisoned cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from tokenspeed_core.api.attention import (
    AttentionKernel,
    AttentionLimits,
    AttentionProblem,
    AttentionStep,
)
from tokenspeed_testing.inputs import split_blocks

NUM_LAYERS = 2  # of the arena: a block holds all layers, so caches are strided


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a step: query tokens, and tokens in the cache after the step; decodes first.

    The blocks of the first `num_shared` tokens are the same in all rows but `others`.
    """

    num_queries: tuple[int, ...]
    seq_lens: tuple[int, ...]
    num_shared: int = 0
    others: tuple[int, ...] = ()  # indices of rows, never 0


@dataclass(frozen=True, slots=True, eq=False)
class Fixture:
    """A step with its tensors, and the expected output (float32 [T, H, V])."""

    step: AttentionStep
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    expected: Tensor
    sinks: Tensor | None  # float32 [H]


def make_fixture(
    problem: AttentionProblem,
    rows: Rows,
    device: torch.device,
    *,
    seed: int,
    max_len: int | None = None,
    first_block: int = 0,
    query_scale: float = 1.0,
    last_value: float = 0.0,
) -> Fixture:
    """Build a step over scattered blocks.

    Memory that no token wrote is NaN, and table entries after a row's last block are -1. Block ids
    start at `first_block`. Queries are normal numbers times `query_scale`.
    `last_value` is added to the values in the last block of each row, so that a kernel that stops
    early is wrong by more than the tolerance.
    """
    generator = torch.Generator().manual_seed(seed)
    size, num_rows = problem.block_size, len(rows.seq_lens)
    longest = max(rows.seq_lens) if max_len is None else max_len
    num_blocks = -(-longest // size) + 1
    dtype, kv_dtype = getattr(torch, problem.dtype), getattr(torch, problem.kv_dtype)
    num_used = num_rows * num_blocks + 1
    pool = first_block + num_used
    shape = size, problem.num_kv_heads, problem.head_size, problem.out_size
    num_values = size * problem.num_kv_heads * (problem.head_size + problem.out_size)
    arena = torch.full((pool, NUM_LAYERS, num_values), float("nan"), dtype=kv_dtype)
    caches = split_blocks(arena[:, NUM_LAYERS - 1], *shape)
    table = torch.full((num_rows, num_blocks), -1, dtype=torch.int32)
    order = iter((first_block + torch.randperm(num_used, generator=generator)).tolist())
    for row, length in enumerate(rows.seq_lens):
        for index, first in enumerate(range(0, length, size)):
            if row and row not in rows.others and first + size <= rows.num_shared:
                table[row, index] = table[0, index]
                continue
            table[row, index] = block = next(order)
            is_last = first + size >= length
            for cache, added in zip(caches, (0.0, last_value if is_last else 0.0), strict=True):
                filled = cache[block, : min(size, length - first)]
                filled.copy_(torch.randn(filled.shape, generator=generator) + added)
    starts = (0, *accumulate(rows.num_queries))
    # q is a slice of a wider tensor, as a joint projection of q, k and v returns it
    wide = torch.randn(
        (starts[-1], problem.num_heads + 2 * problem.num_kv_heads, problem.head_size),
        generator=generator,
    )
    wide = (wide * query_scale).to(dtype)
    # Scores are about as large, so a sink takes a noticeable share of the softmax.
    sinks = torch.randn(problem.num_heads, generator=generator) + 2 if problem.has_sinks else None
    q = wide[:, : problem.num_heads]
    expected = formula(q, *caches, sinks, starts, rows.seq_lens, table, problem)
    moved = split_blocks(arena.to(device)[:, NUM_LAYERS - 1], *shape)
    step = AttentionStep(
        num_rows=num_rows,
        num_tokens=starts[-1],
        max_num_query=max(rows.num_queries),
        max_seq_len=longest,
        query_start=torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(rows.seq_lens, dtype=torch.int32, device=device),
        block_table=table.to(device),
        host_query_start=starts,
        host_seq_lens=rows.seq_lens,
    )
    return Fixture(
        step,
        wide.to(device)[:, : problem.num_heads],
        *moved,
        expected.to(device),
        None if sinks is None else sinks.to(device),
    )


def run(kernel: AttentionKernel, fixture: Fixture, out: Tensor) -> None:
    """Call a kernel's `forward` with the tensors of a fixture."""
    forward: Callable[..., None] = kernel.forward
    sinks = {} if fixture.sinks is None else {"sinks": fixture.sinks}
    forward(fixture.q, fixture.k_cache, fixture.v_cache, out, **sinks)


def limits_of(fixture: Fixture) -> AttentionLimits:
    """Return the smallest limits that fit a fixture."""
    num_blocks = fixture.step.block_table.shape[1]
    return AttentionLimits(
        max_num_rows=fixture.step.num_rows,
        max_num_tokens=fixture.step.num_tokens,
        max_model_len=num_blocks * fixture.k_cache.shape[1],
        max_num_blocks=num_blocks,
    )


def formula(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    sinks: Tensor | None,
    starts: Iterable[int],
    seq_lens: tuple[int, ...],
    table: Tensor,
    problem: AttentionProblem,
) -> Tensor:
    """Compute attention in float32 by its definition, row by row; rows of length 0 are left NaN."""
    out = torch.full((*q.shape[:2], problem.out_size), float("nan"))
    num_groups = problem.num_heads // problem.num_kv_heads
    for row, (start, stop) in enumerate(pairwise(starts)):
        length = seq_lens[row]
        if length == 0 or start == stop:
            continue
        blocks = table[row, : -(-length // problem.block_size)].long()
        k = _keys(k_cache, blocks, length).repeat_interleave(num_groups, dim=1)
        v = _keys(v_cache, blocks, length).repeat_interleave(num_groups, dim=1)
        position = torch.arange(length - (stop - start), length)[:, None]
        key = torch.arange(length)
        is_whole = problem.is_bidirectional and length == stop - start
        is_hidden = (key > position) & (not is_whole)
        if problem.window is not None and problem.is_chunked:
            is_hidden |= key // problem.window != position // problem.window
        elif problem.window is not None:
            is_hidden |= (key - position).abs() >= problem.window
        scores = torch.einsum("thd,lhd->htl", q[start:stop].float(), k) * problem.scale
        if problem.soft_cap is not None:
            scores = problem.soft_cap * torch.tanh(scores / problem.soft_cap)
        scores = scores.masked_fill(is_hidden, float("-inf"))
        if sinks is not None:
            column = sinks[:, None, None].expand(-1, stop - start, 1)
            scores = torch.cat((scores, column), dim=-1)
        probabilities = scores.softmax(dim=-1)[..., :length]
        out[start:stop] = torch.einsum("htl,lhd->thd", probabilities, v)
    return out


def _keys(cache: Tensor, blocks: Tensor, length: int) -> Tensor:
    """Return the first `length` keys or values of a row, float32 [L, K, D]."""
    if cache.dtype.itemsize == 1:  # PyTorch cannot index 8-bit floats
        found = cache.view(torch.uint8)[blocks].view(cache.dtype)
    else:
        found = cache[blocks]
    return found.flatten(0, 1)[:length].float()
