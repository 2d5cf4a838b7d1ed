# mypy: allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators, allow-untyped-defs, no-warn-return-any
"""The block-scaled GEMM kernel of `linear_mxfp8` and `linear_nvfp4`: y [T, N] = x [T, K] @ w [N, K].T.

Scales are row-major, one per group of a row: [T, K / GROUP] and [N, K / GROUP]. The tensor cores of compute capability
10.0 apply them (`tl.dot_scaled`).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def operand(
    ptr,
    scale_ptr,
    row,
    stride,
    scale_stride,
    PACKED: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return pointers to the first BLOCK_K values of rows, PACKED per element, and to their scales."""
    values = ptr + row[:, None] * stride + tl.arange(0, BLOCK_K // PACKED)[None, :]
    return values, scale_ptr + row[:, None] * scale_stride + tl.arange(0, BLOCK_K // GROUP)[None, :]


@triton.jit(do_not_specialize=["num_rows"])
def multiply(
    x_ptr,
    x_scale_ptr,
    w_ptr,
    w_scale_ptr,
    scale_ptr,
    bias_ptr,
    y_ptr,
    x_stride,
    x_scale_stride,
    num_rows,
    N,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    PACKED: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute y [T, N]. Grid (tiles of N, tiles of T). The weight is the left operand, in tiles of 128 rows.

    x and w hold PACKED values of FORMAT per element; GROUP values share a scale; `scale` is a per-tensor factor.
    """
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = column < N
    real = row < num_rows
    # Rows beyond the end repeat the last one and are not stored.
    wide_row = tl.minimum(row, num_rows - 1).to(tl.int64)
    wide_column = tl.minimum(column, N - 1).to(tl.int64)
    w_ptrs, w_scale_ptrs = operand(
        w_ptr, w_scale_ptr, wide_column, K // PACKED, K // GROUP, PACKED, GROUP, BLOCK_K
    )
    x_ptrs, x_scale_ptrs = operand(
        x_ptr, x_scale_ptr, wide_row, x_stride, x_scale_stride, PACKED, GROUP, BLOCK_K
    )
    total = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for start in tl.range(0, K, BLOCK_K):
        w = tl.load(w_ptrs + start // PACKED)
        w_scale = tl.load(w_scale_ptrs + start // GROUP)
        x = tl.load(x_ptrs + start // PACKED)
        x_scale = tl.load(x_scale_ptrs + start // GROUP)
        total = tl.dot_scaled(w, w_scale, FORMAT, x.T, x_scale, FORMAT, total)
    if HAS_SCALE:
        total *= tl.load(scale_ptr)
    if HAS_BIAS:
        total += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)[:, None]
    y_ptrs = y_ptr + wide_row[None, :] * N + wide_column[:, None]
    tl.store(y_ptrs, total.to(y_ptr.dtype.element_ty), mask=real[None, :] & inside[:, None])
