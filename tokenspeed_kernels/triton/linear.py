"""Matrix products with few rows: what a decode step does, bound by reading the weights once.

General libraries tile such products for arithmetic and leave bandwidth unused, most where the output is small.
Here many programs stream the weight: one row over a small weight on the plain cores, up to `MOST_ROWS` on the
matrix units. Beyond that torch's own product is the kernel. Tilings are the best of `benchmarks/linear_tilings.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from tokenspeed_core.api import Problem

MOST_ROWS = 16
SMALL_WEIGHT = 1 << 23   # elements; from there on the matrix units are faster for one row too


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


def one_row_tiling(out_size: int, in_size: int) -> Tiling | None:
    """Return the tiling for one row of x, or None where the matrix units are faster."""
    if out_size * in_size > SMALL_WEIGHT:
        return None
    block_n = 4 if out_size >= 2048 else 2
    block_k = min(2048, in_size & -in_size) if in_size % 256 == 0 else min(2048, triton.next_power_of_2(in_size))
    return Tiling(block_n, block_k, 2 if block_n * block_k <= 4096 else 4, 1)


def some_rows_tiling(out_size: int, in_size: int) -> Tiling:
    """Return the tiling for up to MOST_ROWS rows: wide tiles for wide outputs, long ones for long inputs."""
    if out_size >= 16384:
        tiling = Tiling(64, 128, 4, 3)
    elif out_size > in_size:
        tiling = Tiling(64, 128, 4, 6)
    else:
        tiling = Tiling(32, 256, 4, 6 if out_size >= 4096 else 4)
    return replace(tiling, block_k=min(tiling.block_k, max(16, triton.next_power_of_2(in_size))))


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, tiling: Tiling, *, one_row: bool) -> Tensor:
    """Return x [T, I] @ weight [O, I].T + bias, T being 1 or at most MOST_ROWS; rows of both are contiguous."""
    num_rows, (out_size, in_size) = x.shape[0], weight.shape
    y = torch.empty((num_rows, out_size), dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(out_size, tiling.block_n),)
    shape = {
        "K": in_size, "HAS_BIAS": bias is not None, "BLOCK_N": tiling.block_n, "BLOCK_K": tiling.block_k,
        "num_warps": tiling.num_warps, "num_stages": tiling.num_stages,
    }
    if one_row:
        _few_rows[grid](x, weight, bias, y, x.stride(0), y.stride(0), out_size, M=1, **shape)
    else:
        _some_rows[grid](x, weight, bias, y, x.stride(0), y.stride(0), num_rows, out_size, BLOCK_M=MOST_ROWS, **shape)
    return y


def linear(problem: Problem) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """Return `linear(x [T, I], weight [O, I], bias [O] | None) -> y [T, O]`."""
    out_size, in_size = int(problem["out_size"]), int(problem["in_size"])
    one, some = one_row_tiling(out_size, in_size), some_rows_tiling(out_size, in_size)

    def linear_few_or_many(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        num_rows = x.shape[0]
        if num_rows > MOST_ROWS or num_rows == 0:
            return functional.linear(x, weight, bias)
        if x.stride(1) != 1:
            x = x.contiguous()
        if num_rows == 1 and one is not None:
            return multiply(x, weight, bias, one, one_row=True)
        return multiply(x, weight, bias, some, one_row=False)

    return linear_few_or_many
