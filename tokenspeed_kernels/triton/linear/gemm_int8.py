"""INT8 linear layers (W8A8) with per-token activation scales and per-channel weight scales: the op `linear_int8`.

x is [T, I] and the weight [O, I]. One kernel serves any number of rows: with few, the weight is streamed by many
programs that split the features; with many, tiles are large. Sums of products are exact integers, so that every tiling
gives the same result.
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

FEW_ROWS = 64
TOGETHER = 8  # consecutive tiles of x per tile of the weight

LinearInt8 = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True, slots=True)
class Tiling:
    """Rows of x, rows of the weight and features per tile, warps, stages, programs that split the features."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    num_splits: int = 1


@precompile.jit(do_not_specialize=["num_rows"])
def _multiply(
    x_ptr,
    x_scale_ptr,
    w_ptr,
    w_scale_ptr,
    b_ptr,
    y_ptr,
    partial_ptr,
    count_ptr,
    x_stride,
    num_rows,
    N,
    K: tl.constexpr,
    SHARE: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TOGETHER: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute y [T, N]. Grid (tiles, splits of K).

    Programs for TOGETHER consecutive tiles of T are neighbors, so that they share a weight tile in the L2 cache. With
    SPLITS > 1 each split writes its sums to `partial`; the last one to arrive adds them and resets the tile's count.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row_tiles, column_tiles = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(N, BLOCK_N)
    band = tl.program_id(0) // (TOGETHER * column_tiles)
    height = tl.minimum(row_tiles - band * TOGETHER, TOGETHER)
    within_band = tl.program_id(0) % (TOGETHER * column_tiles)
    row = (band * TOGETHER + within_band % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = within_band // height * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    real, inside = row < num_rows, column < N
    feature = tl.arange(0, BLOCK_K)
    w_ptrs = w_ptr + column[:, None].to(tl.int64) * K + feature[None, :]
    x_ptrs = x_ptr + row[None, :].to(tl.int64) * x_stride + feature[:, None]
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.int32)
    for start in range(split * SHARE, tl.minimum(split * SHARE + SHARE, K), BLOCK_K):
        if K % BLOCK_K == 0:
            w = tl.load(w_ptrs + start, mask=inside[:, None], other=0)
            x = tl.load(x_ptrs + start, mask=real[None, :], other=0)
        else:
            within = start + feature < K
            w = tl.load(w_ptrs + start, mask=inside[:, None] & within[None, :], other=0)
            x = tl.load(x_ptrs + start, mask=real[None, :] & within[:, None], other=0)
        total = tl.dot(w, x, total, out_dtype=tl.int32)
    is_last = True
    mask = real[None, :] & inside[:, None]
    at = row[None, :].to(tl.int64) * N + column[:, None]
    if SPLITS > 1:
        plane = tl.cast(num_rows, tl.int64) * N
        tl.store(partial_ptr + split * plane + at, total, mask=mask)
        tl.debug_barrier()  # all stores of the program come before its count
        counter = count_ptr + tl.program_id(0)
        is_last = tl.atomic_add(counter, 1, sem="acq_rel") == SPLITS - 1
        if is_last:
            total = tl.zeros((BLOCK_N, BLOCK_M), tl.int32)
            for other in range(SPLITS):
                total += tl.load(
                    partial_ptr + other * plane + at, mask=mask, other=0, cache_modifier=".cg"
                )
            tl.store(counter, 0)
    if is_last:
        y = total.to(tl.float32)
        y *= tl.load(x_scale_ptr + row, mask=real, other=0.0)[None, :]
        y *= tl.load(w_scale_ptr + column, mask=inside, other=0.0)[:, None]
        if HAS_BIAS:
            y += tl.load(b_ptr + column, mask=inside, other=0.0).to(tl.float32)[:, None]
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)


def tiling_of(out_size: int, in_size: int, num_rows: int) -> Tiling:
    """Return the tiling for a number of rows. Small weights make few tiles, so their features are split."""
    if num_rows > FEW_ROWS:
        return Tiling(128, 128, 128, 8, 3)
    block_m = max(16, triton.next_power_of_2(num_rows))
    splits = 1 if out_size >= 16384 or in_size < 2048 else 4
    return Tiling(block_m, 64, 128, 4, 6, splits)


class LinearInt8Kernel:
    """The linear layer for one weight shape and any number of rows."""

    def __init__(self, problem: Problem, tiling: Tiling | None = None) -> None:
        """Use a `tiling` for all numbers of rows, or else that of `tiling_of`."""
        self._out_size, self._in_size = problem["out_size"], problem["in_size"]
        self._dtype: torch.dtype = getattr(torch, problem["dtype"])
        self._tiling = tiling
        self._pdl = supports_pdl()
        self._counts: Tensor | None = None

    def __call__(
        self, x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None
    ) -> Tensor:
        """Return y [T, O]. Rows of x may be strided. Calls must be ordered on one stream."""
        num_rows, out_size, in_size = x.shape[0], self._out_size, self._in_size
        y = x.new_empty((num_rows, out_size), dtype=self._dtype)
        if num_rows == 0:
            return y
        tiling = self._tiling or tiling_of(out_size, in_size, num_rows)
        num_tiles = triton.cdiv(num_rows, tiling.block_m) * triton.cdiv(out_size, tiling.block_n)
        partial, counts = None, None
        if tiling.num_splits > 1:
            partial = x.new_empty((tiling.num_splits, num_rows, out_size), dtype=torch.int32)
            if self._counts is None or self._counts.numel() < num_tiles:
                self._counts = x.new_zeros((num_tiles,), dtype=torch.int32)
            counts = self._counts
        _multiply[(num_tiles, tiling.num_splits)](
            x,
            x_scale,
            weight,
            weight_scale,
            bias,
            y,
            partial,
            counts,
            x.stride(0),
            num_rows,
            out_size,
            K=in_size,
            SHARE=triton.cdiv(triton.cdiv(in_size, tiling.block_k), tiling.num_splits)
            * tiling.block_k,
            SPLITS=tiling.num_splits,
            HAS_BIAS=bias is not None,
            BLOCK_M=tiling.block_m,
            BLOCK_N=tiling.block_n,
            BLOCK_K=tiling.block_k,
            TOGETHER=TOGETHER,
            PDL=self._pdl,
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
            launch_pdl=self._pdl,
        )
        return y

    def compile(self) -> None:
        """Precompile the kernels that calls can launch."""
        weight = precompile.blank("int8", self._out_size, self._in_size)
        weight_scale = precompile.blank("float32", self._out_size, 1)
        for num_rows in (16, 32, FEW_ROWS, 2 * FEW_ROWS):
            x = precompile.blank("int8", num_rows, self._in_size)
            x_scale = precompile.blank("float32", num_rows, 1)
            precompile.compile_for(copy(self), x, x_scale, weight, weight_scale, None)


def linear_int8(problem: Problem) -> LinearInt8:
    """Return `linear(x, x_scale, weight, weight_scale, bias) -> y [T, O]`; see the op's contract for shapes."""
    kernel = LinearInt8Kernel(problem)
    kernel.compile()
    return kernel
