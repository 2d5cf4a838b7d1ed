"""Linear maps of e4m3 operands with a scale a block: the quantisation of rows by groups, and the product.

128 neighbours are multiplied in the matrix units, and what comes of them is scaled before it is summed in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_core.api import Problem
from tokenspeed_kernels.triton.fp8 import LARGEST, LEAST

GROUP = 128  # neighbours that share a scale; also the rows of a weight that do
GROUPS_AT_ONCE = 8  # that a program quantises
BLOCK_N = 64  # rows of the weight in a tile: a divisor of GROUP, so that it has one scale for each group of features
NUM_WARPS = 4

LinearFp8Block = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True, slots=True)
class Tiling:
    """Rows of x in a tile, and tiles in flight."""

    block_m: int
    num_stages: int


TILINGS = (Tiling(16, 6), Tiling(32, 5), Tiling(64, 5))
"""By rising number of rows; the last is for all that are more."""


@triton.jit
def _quantize(
    x_ptr, y_ptr, scale_ptr, x_stride, N: tl.constexpr, NUM_GROUPS: tl.constexpr, GROUP: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    mask = column < N
    x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), axis=1), LEAST) / LARGEST
    y = tl.minimum(tl.maximum(x / scale[:, None], -LARGEST), LARGEST)
    tl.store(y_ptr + row * N + column, y.to(tl.float8e4nv), mask=mask)
    tl.store(scale_ptr + row * NUM_GROUPS + group, scale, mask=group < NUM_GROUPS)


@triton.jit(do_not_specialize=["num_rows"])
def _multiply(
    x_ptr, x_scale_ptr, w_ptr, w_scale_ptr, b_ptr, y_ptr, x_stride, x_scale_stride, num_rows, N, K: tl.constexpr,
    NUM_GROUPS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Store y [T, N]: grid (tiles of N, tiles of T). The weight is the side of many rows, whatever the tokens."""
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = column < N
    real = row < num_rows
    feature = tl.arange(0, GROUP)
    w_ptrs = w_ptr + column[:, None].to(tl.int64) * K + feature[None, :]
    x_ptrs = x_ptr + row[None, :].to(tl.int64) * x_stride + feature[:, None]
    x_scale_ptrs = x_scale_ptr + row.to(tl.int64) * x_scale_stride
    w_scale_ptrs = w_scale_ptr + tl.program_id(0) * BLOCK_N // GROUP * NUM_GROUPS
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for group in range(NUM_GROUPS):
        start = group * GROUP
        if K % GROUP == 0:
            w = tl.load(w_ptrs + start, mask=inside[:, None], other=0.0)
            x = tl.load(x_ptrs + start, mask=real[None, :], other=0.0)
        else:
            within = start + feature < K
            w = tl.load(w_ptrs + start, mask=inside[:, None] & within[None, :], other=0.0)
            x = tl.load(x_ptrs + start, mask=real[None, :] & within[:, None], other=0.0)
        scale = tl.load(x_scale_ptrs + group, mask=real, other=0.0) * tl.load(w_scale_ptrs + group)
        total += tl.dot(w, x) * scale[None, :]
    if HAS_BIAS:
        total += tl.load(b_ptr + column, mask=inside, other=0.0).to(tl.float32)[:, None]
    y_ptrs = y_ptr + row[None, :].to(tl.int64) * N + column[:, None]
    tl.store(y_ptrs, total.to(y_ptr.dtype.element_ty), mask=real[None, :] & inside[:, None])


def quantize_fp8_groups(problem: Problem) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Return `quantize(x [T, N]) -> (y float8_e4m3fn [T, N], scale float32 [T, ceil(N / 128)])`."""
    size: int = problem["size"]
    num_groups = triton.cdiv(size, GROUP)

    def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
        num_rows = x.shape[0]
        y = torch.empty((num_rows, size), dtype=torch.float8_e4m3fn, device=x.device)
        scale = torch.empty((num_rows, num_groups), dtype=torch.float32, device=x.device)
        if num_rows:
            _quantize[(num_rows, triton.cdiv(num_groups, GROUPS_AT_ONCE))](
                x, y, scale, x.stride(0), N=size, NUM_GROUPS=num_groups, GROUP=GROUP, AT_ONCE=GROUPS_AT_ONCE,
            )
        return y, scale

    return quantize


def linear_fp8_block(problem: Problem) -> LinearFp8Block:
    """Return `linear(x, x_scale, weight, weight_scale, bias) -> y [T, O]`; rows of x and its scales may be strided."""
    dtype: torch.dtype = getattr(torch, problem["dtype"])

    def linear(x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
        num_rows, (out_size, in_size) = x.shape[0], weight.shape
        y = torch.empty((num_rows, out_size), dtype=dtype, device=x.device)
        tiling = next((each for each in TILINGS if num_rows <= each.block_m), TILINGS[-1])
        if num_rows:
            _multiply[(triton.cdiv(out_size, BLOCK_N), triton.cdiv(num_rows, tiling.block_m))](
                x, x_scale, weight, weight_scale, bias, y, x.stride(0), x_scale.stride(0), num_rows, out_size,
                K=in_size, NUM_GROUPS=triton.cdiv(in_size, GROUP), HAS_BIAS=bias is not None, BLOCK_M=tiling.block_m,
                BLOCK_N=BLOCK_N, GROUP=GROUP, num_warps=NUM_WARPS, num_stages=tiling.num_stages,
            )
        return y

    return linear
