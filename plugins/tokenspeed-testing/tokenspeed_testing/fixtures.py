"""Steps that attention is tried on: rows of any lengths over a poisoned arena, and what the result should be."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from tokenspeed_core.api.attention import AttentionLimits, AttentionProblem, AttentionStep

NUM_LAYERS = 2  # of the arena: a block holds all layers, so caches are strided


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a step: query tokens and tokens in the cache afterwards, decodes first.

    The blocks that `num_shared` tokens fill are the same in all rows.
    """

    num_queries: tuple[int, ...]
    seq_lens: tuple[int, ...]
    num_shared: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Scene:
    """A step with its tensors, and what attention over it should be (float32 [T, H, D])."""

    step: AttentionStep
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    expected: Tensor


def make_scene(
    problem: AttentionProblem,
    rows: Rows,
    device: torch.device,
    *,
    seed: int,
    max_len: int | None = None,
) -> Scene:
    """Build a step whose blocks are scattered; memory that no step wrote is NaN, table entries past a row -1."""
    generator = torch.Generator().manual_seed(seed)
    size, num_rows = problem.block_size, len(rows.seq_lens)
    longest = max(rows.seq_lens) if max_len is None else max_len
    num_blocks = -(-longest // size) + 1
    dtype, kv_dtype = getattr(torch, problem.dtype), getattr(torch, problem.kv_dtype)
    pool = num_rows * num_blocks + 1
    arena = torch.full(
        (pool, NUM_LAYERS, 2, size, problem.num_kv_heads, problem.head_size),
        float("nan"),
        dtype=kv_dtype,
    )
    table = torch.full((num_rows, num_blocks), -1, dtype=torch.int32)
    order = iter(torch.randperm(pool, generator=generator).tolist())
    for row, length in enumerate(rows.seq_lens):
        for index, first in enumerate(range(0, length, size)):
            if row and first + size <= rows.num_shared:
                table[row, index] = table[0, index]
                continue
            table[row, index] = block = next(order)
            filled = arena[block, NUM_LAYERS - 1, :, : min(size, length - first)]
            filled.copy_(torch.randn(filled.shape, generator=generator))
    starts = (0, *accumulate(rows.num_queries))
    # q is cut from a wider tensor, as a projection of q, k and v together gives it
    wide = torch.randn(
        (starts[-1], problem.num_heads + 2 * problem.num_kv_heads, problem.head_size),
        generator=generator,
    ).to(dtype)
    wide_arena = arena.float()  # torch indexes no eight-bit floats
    caches = wide_arena[:, NUM_LAYERS - 1, 0], wide_arena[:, NUM_LAYERS - 1, 1]
    expected = formula(wide[:, : problem.num_heads], *caches, starts, rows.seq_lens, table, problem)
    moved = arena.to(device)
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
    return Scene(
        step,
        wide.to(device)[:, : problem.num_heads],
        moved[:, NUM_LAYERS - 1, 0],
        moved[:, NUM_LAYERS - 1, 1],
        expected.to(device),
    )


def limits_of(scene: Scene) -> AttentionLimits:
    """Return limits that just hold a scene."""
    num_blocks = scene.step.block_table.shape[1]
    return AttentionLimits(
        max_num_rows=scene.step.num_rows,
        max_num_tokens=scene.step.num_tokens,
        max_model_len=num_blocks * scene.k_cache.shape[1],
        max_num_blocks=num_blocks,
    )


def formula(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    starts: Iterable[int],
    seq_lens: tuple[int, ...],
    table: Tensor,
    problem: AttentionProblem,
) -> Tensor:
    """Attend token by token in float32, as the definition has it; rows of length 0 are left NaN."""
    out = torch.full(q.shape, float("nan"))
    num_groups = problem.num_heads // problem.num_kv_heads
    for row, (start, stop) in enumerate(pairwise(starts)):
        if seq_lens[row] == 0:
            continue
        for token in range(start, stop):
            position = seq_lens[row] - stop + token
            first = 0 if problem.window is None else max(0, position - problem.window + 1)
            key = torch.arange(first, position + 1)
            blocks, offsets = table[row, key // problem.block_size].long(), key % problem.block_size
            k = k_cache[blocks, offsets].float().repeat_interleave(num_groups, dim=1)
            v = v_cache[blocks, offsets].float().repeat_interleave(num_groups, dim=1)
            scores = torch.einsum("hd,lhd->hl", q[token].float(), k) * problem.scale
            out[token] = torch.einsum("hl,lhd->hd", scores.softmax(dim=-1), v)
    return out
