"""Matrix products of e4m3 rows with e4m3 weights, a scale for each row of both.

With few rows, what a decode step does, the product is bound by reading the weight once: programs stream it through
shared memory into the matrix units, with the few rows of x as their narrow side. More rows go to torch's
scaled product, which is the vendor's library.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_core.api import Problem

MOST_ROWS = 64    # of x that the streaming kernel takes
MOST_INEXACT = 128  # products that the matrix units add up in their own, shorter, accumulator

LinearFp8 = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True, slots=True)
class Tiling:
    """Rows of the weight and features in a tile, warps of a program, tiles in flight."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@triton.jit(do_not_specialize=["num_rows"])
def _few_rows(
    x_ptr, x_scale_ptr, w_ptr, w_scale_ptr, b_ptr, y_ptr, x_stride, num_rows, N, K: tl.constexpr,
    HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    MOST_INEXACT: tl.constexpr,
):
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < N
    row = tl.arange(0, BLOCK_M)
    real = row < num_rows
    feature = tl.arange(0, BLOCK_K)
    w_ptrs = w_ptr + column[:, None].to(tl.int64) * K + feature[None, :]
    x_ptrs = x_ptr + row[None, :] * x_stride + feature[:, None]
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            w = tl.load(w_ptrs + start, mask=inside[:, None], other=0.0, eviction_policy="evict_first")
            x = tl.load(x_ptrs + start, mask=real[None, :], other=0.0)
        else:
            within = start + feature < K
            w = tl.load(w_ptrs + start, mask=inside[:, None] & within[None, :], other=0.0)
            x = tl.load(x_ptrs + start, mask=real[None, :] & within[:, None], other=0.0)
        total = tl.dot(w, x, total, max_num_imprecise_acc=MOST_INEXACT)
    w_scale = tl.load(w_scale_ptr + column, mask=inside, other=0.0)
    x_scale = tl.load(x_scale_ptr + row, mask=real, other=0.0)
    y = total * w_scale[:, None] * x_scale[None, :]
    if HAS_BIAS:
        y += tl.load(b_ptr + column, mask=inside, other=0.0).to(tl.float32)[:, None]
    y_ptrs = y_ptr + row[None, :] * N + column[:, None]
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=real[None, :] & inside[:, None])


def tiling_of(out_size: int, in_size: int) -> Tiling:
    """Return the tiling for few rows: fewer tiles in flight where many programs share a multiprocessor."""
    return Tiling(64, min(128, max(32, triton.next_power_of_2(in_size))), 4, 4 if out_size >= 16384 else 8)


def multiply_few(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, dtype: torch.dtype,
    tiling: Tiling,
) -> Tensor:
    """Return y [T, O] of `dtype` for few rows; those of x may be strided, weight is contiguous."""
    num_rows, (out_size, in_size) = x.shape[0], weight.shape
    block_m = max(16, triton.next_power_of_2(num_rows))
    y = torch.empty((num_rows, out_size), dtype=dtype, device=x.device)
    _few_rows[(triton.cdiv(out_size, tiling.block_n),)](
        x, x_scale, weight, weight_scale, bias, y, x.stride(0), num_rows, out_size, K=in_size,
        HAS_BIAS=bias is not None, BLOCK_M=block_m, BLOCK_N=tiling.block_n, BLOCK_K=tiling.block_k,
        MOST_INEXACT=MOST_INEXACT, num_warps=tiling.num_warps, num_stages=tiling.num_stages,
    )
    return y


def linear_fp8(problem: Problem) -> LinearFp8:
    """Return `linear(x, x_scale, weight, weight_scale, bias) -> y [T, O]`, whose shapes stand in the contract."""
    dtype: torch.dtype = getattr(torch, problem["dtype"])
    tiling = tiling_of(problem["out_size"], problem["in_size"])

    def linear(x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
        if 0 < x.shape[0] <= MOST_ROWS:
            return multiply_few(x, x_scale, weight, weight_scale, bias, dtype, tiling)
        if x.shape[0] == 0:
            return torch.empty((0, weight.shape[0]), dtype=dtype, device=x.device)
        return torch._scaled_mm(
            x.contiguous(), weight.t(), scale_a=x_scale, scale_b=weight_scale.t(), bias=bias, out_dtype=dtype,
            use_fast_accum=True,
        )

    return linear
