"""The op `moe_logits`: router logits y [T, E] = x [T, N] @ weight [E, N].T in float32.

For few tokens, a program multiplies the weight row of an expert on the CUDA cores. For many bfloat16 tokens, the tensor
cores compute the products. They get the weight as a sum of three bfloat16 terms, which hold all of its 24 bits, so every
product is exact. Up to 512 tokens make few tiles, so several programs split the features of a tile. For many tokens of
other dtypes, cuBLAS runs the GEMM.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_core.api import Problem
from tokenspeed_kernels.triton import precompile
from tokenspeed_kernels.triton.pdl import supports_pdl

MAX_FEW_TOKENS = 16  # each reads the whole weight, mostly from the L2 cache
PER_WARP = 2048  # weight elements per warp


@dataclass(frozen=True, slots=True)
class Tiling:
    """Tokens, experts and features of a tile, warps, and pipeline stages."""

    block_m: int
    block_e: int
    block_k: int
    num_warps: int
    num_stages: int


SMALL = Tiling(16, 32, 128, 4, 2)
MEDIUM = Tiling(64, 32, 128, 4, 3)
LARGE = Tiling(128, 64, 64, 8, 3)  # if there are enough tiles for all multiprocessors
MAX_SMALL_TOKENS, MIN_LARGE_TILES = 512, 128
MAX_SPLITS, MAX_PROGRAMS = 16, 512  # of small tiles
# Numbers of tokens that together use all splits and tilings.
PRECOMPILED = (32, 64, 128, 256, MAX_SMALL_TOKENS, MAX_SMALL_TOKENS + 1, 1 << 17)


@precompile.jit
def _logits(
    x_ptr,
    w_ptr,
    y_ptr,
    x_stride,
    E: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """y [T, E] = x @ w.T in float32. Grid (E, T). PDL: the weight is loaded before the wait (see `pdl`)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    expert, token = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    feature = tl.arange(0, BLOCK_K)
    w = tl.load(w_ptr + expert * K + feature, mask=feature < K, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + token * x_stride + feature, mask=feature < K, other=0.0).to(tl.float32)
    tl.store(y_ptr + token * E + expert, tl.sum(w * x, axis=0))


@precompile.jit(do_not_specialize=["num_tokens"])
def _many_logits(
    x_ptr,
    w_ptr,
    y_ptr,
    partial_ptr,
    count_ptr,
    num_tokens,
    x_stride,
    E: tl.constexpr,
    K: tl.constexpr,
    SHARE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """y [T, E] = x @ w.T for x in bfloat16 and w in float32. Grid (tiles of E, tiles of T, splits of K).

    With SPLITS > 1, each split computes SHARE features and writes its sums to `partial` [SPLITS, T, E]. The last split
    to arrive adds them, always in the same order, and resets the tile's count for the next launch.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    expert = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    split = tl.program_id(2)
    k = split * SHARE + tl.arange(0, BLOCK_K)
    is_token, is_expert = (token < num_tokens)[:, None], (expert < E)[:, None]
    x_ptrs = x_ptr + token[:, None] * x_stride + k[None, :]
    w_ptrs = w_ptr + expert[:, None] * K + k[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_E], dtype=tl.float32)
    # SHARE is constant, so that the compiler knows the alignment and loads 16 bytes at a time.
    for start in tl.range(0, SHARE, BLOCK_K):
        inside = (k < K - start)[None, :]
        x = tl.load(x_ptrs + start, mask=is_token & inside, other=0.0)
        w = tl.load(w_ptrs + start, mask=is_expert & inside, other=0.0)
        high = w.to(tl.bfloat16)
        rest = w - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        acc = tl.dot(x, tl.trans(low), acc)
        acc = tl.dot(x, tl.trans(middle), acc)
        acc = tl.dot(x, tl.trans(high), acc)
    at = token[:, None] * E + expert[None, :]
    mask = is_token & (expert < E)[None, :]
    is_last = True
    if SPLITS > 1:
        plane = tl.cast(num_tokens, tl.int64) * E
        tl.store(partial_ptr + split * plane + at, acc, mask=mask)
        tl.debug_barrier()  # all stores of the program come before its count
        counter = count_ptr + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        is_last = tl.atomic_add(counter, 1, sem="acq_rel") == SPLITS - 1
        if is_last:
            acc = tl.zeros([BLOCK_M, BLOCK_E], dtype=tl.float32)
            for other in tl.static_range(SPLITS):
                acc += tl.load(
                    partial_ptr + other * plane + at, mask=mask, other=0.0, cache_modifier=".cg"
                )
            tl.store(counter, 0)
    if is_last:
        tl.store(y_ptr + at, acc, mask=mask)


class ManyLogits:
    """Logits of many bfloat16 tokens for one weight shape, with the counters that the splits of a tile share."""

    def __init__(self, num_experts: int, size: int) -> None:
        self._num_experts, self._size = num_experts, size
        self._pdl = supports_pdl()
        self._counts: Tensor | None = None

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return y float32 [T, E]. Rows of x may be strided. Calls share counters, so they must be ordered on one stream."""
        num_tokens, num_experts, size = x.shape[0], self._num_experts, self._size
        tiling, tiles, num_splits = self.partition(num_tokens)
        y = x.new_empty((num_tokens, num_experts), dtype=torch.float32)
        partial = None
        if num_splits > 1:
            partial = x.new_empty((num_splits, num_tokens, num_experts), dtype=torch.float32)
            if self._counts is None:
                self._counts = x.new_zeros(MAX_PROGRAMS, dtype=torch.int32)
        _many_logits[*tiles, num_splits](
            x,
            weight,
            y,
            partial,
            self._counts if num_splits > 1 else None,
            num_tokens,
            x.stride(0),
            E=num_experts,
            K=size,
            SHARE=_share(size, tiling, num_splits),
            SPLITS=num_splits,
            BLOCK_M=tiling.block_m,
            BLOCK_E=tiling.block_e,
            BLOCK_K=tiling.block_k,
            PDL=self._pdl,
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
            launch_pdl=self._pdl,
        )
        return y

    def partition(self, num_tokens: int) -> tuple[Tiling, tuple[int, int], int]:
        """Return the tiling, the tiles of experts and of tokens, and the splits of features."""
        if num_tokens > MAX_SMALL_TOKENS:
            tiles = self._tiles(LARGE, num_tokens)
            tiling = LARGE if tiles[0] * tiles[1] >= MIN_LARGE_TILES else MEDIUM
            return tiling, self._tiles(tiling, num_tokens), 1
        tiles, num_splits = self._tiles(SMALL, num_tokens), MAX_SPLITS
        while num_splits * tiles[0] * tiles[1] > MAX_PROGRAMS:
            num_splits //= 2
        num_blocks = triton.cdiv(self._size, SMALL.block_k)
        blocks = triton.cdiv(num_blocks, max(1, num_splits))
        return SMALL, tiles, triton.cdiv(num_blocks, blocks)

    def _tiles(self, tiling: Tiling, num_tokens: int) -> tuple[int, int]:
        return (
            triton.cdiv(self._num_experts, tiling.block_e),
            triton.cdiv(num_tokens, tiling.block_m),
        )


def _share(size: int, tiling: Tiling, num_splits: int) -> int:
    """Return the features of each split, a multiple of those of a tile."""
    return triton.cdiv(triton.cdiv(size, tiling.block_k), num_splits) * tiling.block_k


def moe_logits(problem: Problem) -> Callable[[Tensor, Tensor], Tensor]:
    """Return `logits(x [T, N], weight float32 [E, N]) -> y float32 [T, E]`. Rows of x may be strided."""
    num_experts, size, pdl = problem["num_experts"], problem["hidden_size"], supports_pdl()
    block_k = triton.next_power_of_2(size)
    many = ManyLogits(num_experts, size) if problem["dtype"] == "bfloat16" else None
    settings = {
        "E": num_experts,
        "K": size,
        "BLOCK_K": block_k,
        "PDL": pdl,
        "num_warps": min(8, max(1, block_k // PER_WARP)),
        "launch_pdl": pdl,
    }

    def logits(x: Tensor, weight: Tensor) -> Tensor:
        num_tokens = x.shape[0]
        if num_tokens > MAX_FEW_TOKENS:
            return torch.mm(x.to(torch.float32), weight.t()) if many is None else many(x, weight)
        y = torch.empty((num_tokens, num_experts), dtype=torch.float32, device=x.device)
        if num_tokens:
            _logits[(num_experts, num_tokens)](x, weight, y, x.stride(0), **settings)
        return y

    weight = precompile.blank("float32", num_experts, size)
    precompile.compile_for(logits, precompile.blank(problem["dtype"], 1, size), weight)
    if many is not None:
        for num_tokens in PRECOMPILED:
            x = precompile.blank("bfloat16", num_tokens, size)
            precompile.compile_for(copy(many), x, weight)
    return logits
