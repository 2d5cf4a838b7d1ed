"""Matrix products with few rows: what a decode step does, bound by reading the weights once.

General libraries tile such products for arithmetic and leave half of the bandwidth unused when the output is
small. Here many small programs stream the weight, each some of its rows; up to `FEW_ROWS` of x they multiply
on the plain cores, up to `MOST_ROWS` on the matrix units. Beyond that torch's own product is the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from tokenspeed_core.api import Problem

FEW_ROWS = 4
MOST_ROWS = 16


@dataclass(frozen=True, slots=True)
class Tiling:
    """Rows of the weight and features in a tile, warps of a program, tiles in flight."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@triton.jit
def _few_rows(
    x_ptr, w_ptr, b_ptr, y_ptr, x_stride, y_stride, N, K: tl.constexpr,
    M: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < N
    feature = tl.arange(0, BLOCK_K)
    row = tl.arange(0, M)
    total = tl.zeros((M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        at = start + feature
        within = at < K
        w = tl.load(
            w_ptr + column[:, None].to(tl.int64) * K + at[None, :],
            mask=inside[:, None] & within[None, :], other=0.0, eviction_policy="evict_first",
        ).to(tl.float32)
        x = tl.load(x_ptr + row[:, None] * x_stride + at[None, :], mask=within[None, :], other=0.0).to(tl.float32)
        total += tl.sum(x[:, None, :] * w[None, :, :], axis=2)
    if HAS_BIAS:
        total += tl.load(b_ptr + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    tl.store(
        y_ptr + row[:, None] * y_stride + column[None, :], total.to(y_ptr.dtype.element_ty), mask=inside[None, :],
    )


@triton.jit
def _some_rows(
    x_ptr, w_ptr, b_ptr, y_ptr, x_stride, y_stride, num_rows, N, K: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < N
    feature = tl.arange(0, BLOCK_K)
    row = tl.arange(0, BLOCK_M)
    real = row < num_rows
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in range(0, K, BLOCK_K):
        at = start + feature
        within = at < K
        w = tl.load(
            w_ptr + column[:, None].to(tl.int64) * K + at[None, :],
            mask=inside[:, None] & within[None, :], other=0.0, eviction_policy="evict_first",
        )
        x = tl.load(
            x_ptr + row[None, :] * x_stride + at[:, None], mask=real[None, :] & within[:, None], other=0.0,
        )
        total = tl.dot(w, x, total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(b_ptr + column, mask=inside, other=0.0).to(tl.float32)[:, None]
    tl.store(
        y_ptr + row[None, :] * y_stride + column[:, None], total.to(y_ptr.dtype.element_ty),
        mask=real[None, :] & inside[:, None],
    )


def few_tiling(out_size: int, in_size: int, num_rows: int) -> Tiling:
    """Return the tiling for up to FEW_ROWS rows: some thousand programs, each with a long run of a few rows."""
    block_n = 1
    while block_n < 16 and out_size // (2 * block_n) >= 1024:
        block_n *= 2
    block_k = min(triton.next_power_of_2(in_size), max(256, 4096 // max(1, block_n * num_rows) * 1))
    return Tiling(block_n, min(block_k, 2048), 4, 1)


def some_tiling(out_size: int, in_size: int) -> Tiling:
    """Return the tiling for more rows than that: enough programs for every multiprocessor, tiles in flight."""
    block_n = 16 if out_size <= 16384 else 32
    return Tiling(block_n, min(256, max(16, triton.next_power_of_2(in_size))), 4, 4)


def skinny(x: Tensor, weight: Tensor, bias: Tensor | None, tiling: Tiling) -> Tensor:
    """Return x [T, I] @ weight [O, I].T + bias for T up to MOST_ROWS. The last dimension of x is contiguous."""
    num_rows, (out_size, in_size) = x.shape[0], weight.shape
    y = torch.empty((num_rows, out_size), dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(out_size, tiling.block_n),)
    shared = dict(
        HAS_BIAS=bias is not None, BLOCK_N=tiling.block_n, BLOCK_K=tiling.block_k, num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    if num_rows <= FEW_ROWS and num_rows in (1, 2, 4):
        _few_rows[grid](
            x, weight, bias, y, x.stride(0), y.stride(0), out_size, K=in_size, M=num_rows, **shared,
        )
    else:
        _some_rows[grid](
            x, weight, bias, y, x.stride(0), y.stride(0), num_rows, out_size, K=in_size,
            BLOCK_M=MOST_ROWS, **shared,
        )
    return y


def linear(problem: Problem) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """Return `linear(x [T, I], weight [O, I], bias [O] | None) -> y [T, O]`."""
    out_size, in_size = int(problem["out_size"]), int(problem["in_size"])
    few = {num: few_tiling(out_size, in_size, num) for num in (1, 2, 4)}
    some = some_tiling(out_size, in_size)

    def linear_few_or_many(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        num_rows = x.shape[0]
        if num_rows > MOST_ROWS or num_rows == 0:
            return functional.linear(x, weight, bias)
        return skinny(x, weight, bias, few.get(num_rows, some))

    return linear_few_or_many

