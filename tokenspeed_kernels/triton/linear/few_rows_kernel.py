"""The kernel of linear layers for 2 to 16 tokens: weights go from memory to the matrix units without shared memory.

A matrix instruction (mma.m16n8k16) multiplies 16 rows of the weight by 8 tokens. Each thread of a warp holds parts of
its operands: of each row, two pairs of features that are 8 apart. A product does not depend on the order of features,
so a thread loads 8 adjacent features at once and passes them as the pairs of two instructions, with weight and
tokens in the same order. The permutations below describe this order; they move no data.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernels.triton import precompile
from tokenspeed_kernels.triton.activation.gated import activated
from tokenspeed_kernels.triton.pdl import fetch

_LINE_BYTES = tl.constexpr(128)


@triton.jit
def _load(
    ptr,
    stride,
    first,
    num_rows,
    start,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
    WARPS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    IS_WEIGHT: tl.constexpr,
):
    """Load ROWS rows from `first` on, the last one again past the end, and 32 * STEPS * WARPS features from `start` on.

    Returns [WARPS, 2 * ROWS / 16, 8, STEPS, 2, 2, 4, 2]: the features of a warp in the order of two instructions per
    step. The axes of the loaded tensor are (half tile, step, warp, row) and feature, so that a thread loads 16 bytes
    of eight rows at once, four threads per row.
    """
    at = tl.arange(0, ROWS * STEPS * WARPS)
    row = tl.minimum(first + at // (8 * WARPS * STEPS) * 8 + at % 8, num_rows - 1)
    feature = start + (at // 8 % WARPS * STEPS + at // (8 * WARPS) % STEPS) * 32
    column = feature[:, None] + tl.arange(0, 32)[None, :]
    cells = ptr + row[:, None].to(tl.int64) * stride + column
    policy: tl.constexpr = "evict_first" if IS_WEIGHT else ""
    if IS_WHOLE:
        values = tl.load(cells, eviction_policy=policy)
    else:
        values = tl.load(cells, mask=column < K, other=0.0, eviction_policy=policy)
    values = tl.reshape(values, (ROWS // 8, STEPS, WARPS, 8, 4, 2, 2, 2))
    return tl.permute(values, (2, 0, 3, 1, 5, 6, 4, 7))


@triton.jit
def _load_weight(
    ptr,
    stride,
    first,
    num_rows,
    start,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
    WARPS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):
    """Return a part of the weight [WARPS, ROWS, 32 * STEPS]."""
    values = _load(ptr, stride, first, num_rows, start, K, ROWS, STEPS, WARPS, IS_WHOLE, True)
    return tl.reshape(values, (WARPS, ROWS, 32 * STEPS))


@triton.jit
def _load_tokens(
    ptr,
    stride,
    num_rows,
    start,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
    WARPS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):
    """Return a part of the tokens [WARPS, 32 * STEPS, ROWS]."""
    values = _load(ptr, stride, 0, num_rows, start, K, ROWS, STEPS, WARPS, IS_WHOLE, False)
    values = tl.permute(values, (0, 3, 4, 5, 6, 7, 1, 2))
    return tl.reshape(values, (WARPS, 32 * STEPS, ROWS))


@triton.jit
def _fetch_weight(ptr, stride, first, num_rows, start, LENGTH: tl.constexpr, ROWS: tl.constexpr):
    """Prefetch LENGTH features from `start` on of ROWS rows into the L2 cache."""
    LINE: tl.constexpr = _LINE_BYTES * 8 // ptr.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = LENGTH // LINE
    line = tl.arange(0, ROWS * LINES)
    row = tl.minimum(first + line // LINES, num_rows - 1)
    fetch(ptr + row.to(tl.int64) * stride + start + line % LINES * LINE)


@precompile.jit(do_not_specialize=["T"])
def few_rows(
    x_ptr,
    w_ptr,
    b_ptr,
    y_ptr,
    x_stride,
    w_stride,
    T,
    N,
    K: tl.constexpr,
    GATED: tl.constexpr,
    IS_GELU: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STEPS: tl.constexpr,
    WARPS: tl.constexpr,
    FETCHED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write y [T, N] = x [T, K] @ w.T for T <= BLOCK_T. Grid (tiles of BLOCK_N rows of the weight).

    The WARPS warps of a program split the features, in chunks of 32 * STEPS per warp. The next chunk of the weight is
    requested before a chunk is multiplied.
    GATED: the weight is gate and up stacked, and the result is silu(gate) * up, or gelu(gate) * up, with intermediate
    results rounded like those of the separate ops.
    PDL: while the previous kernel is still running, the first chunk of the weight, which no kernel writes, is loaded,
    and the next FETCHED chunks are prefetched into the L2 cache (see `pdl`).
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    CHUNK: tl.constexpr = 32 * STEPS * WARPS
    NUM_CHUNKS: tl.constexpr = (K + CHUNK - 1) // CHUNK
    IS_WHOLE: tl.constexpr = K % CHUNK == 0
    first = tl.program_id(0) * BLOCK_N
    up_ptr = w_ptr + tl.cast(N, tl.int64) * w_stride
    w = _load_weight(w_ptr, w_stride, first, N, 0, K, BLOCK_N, STEPS, WARPS, IS_WHOLE)
    if GATED:
        up = _load_weight(up_ptr, w_stride, first, N, 0, K, BLOCK_N, STEPS, WARPS, IS_WHOLE)
    if PDL:
        for chunk in tl.static_range(1, FETCHED + 1):
            if (chunk + 1) * CHUNK <= K:
                _fetch_weight(w_ptr, w_stride, first, N, chunk * CHUNK, CHUNK, BLOCK_N)
                if GATED:
                    _fetch_weight(up_ptr, w_stride, first, N, chunk * CHUNK, CHUNK, BLOCK_N)
        tl.extra.cuda.gdc_wait()
    products = tl.zeros((WARPS, BLOCK_N, BLOCK_T), tl.float32)
    if GATED:
        up_products = tl.zeros((WARPS, BLOCK_N, BLOCK_T), tl.float32)
    for chunk in tl.static_range(NUM_CHUNKS):
        if chunk + 1 < NUM_CHUNKS:
            next_w = _load_weight(
                w_ptr, w_stride, first, N, (chunk + 1) * CHUNK, K, BLOCK_N, STEPS, WARPS, IS_WHOLE
            )
            if GATED:
                next_up = _load_weight(
                    up_ptr,
                    w_stride,
                    first,
                    N,
                    (chunk + 1) * CHUNK,
                    K,
                    BLOCK_N,
                    STEPS,
                    WARPS,
                    IS_WHOLE,
                )
        x = _load_tokens(x_ptr, x_stride, T, chunk * CHUNK, K, BLOCK_T, STEPS, WARPS, IS_WHOLE)
        products = tl.dot(w, x, products)
        if GATED:
            up_products = tl.dot(up, x, up_products)
        if chunk + 1 < NUM_CHUNKS:
            w = next_w
            if GATED:
                up = next_up
    y = tl.sum(products, axis=0)
    n = first + tl.arange(0, BLOCK_N)
    t = tl.arange(0, BLOCK_T)
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    if HAS_BIAS:
        y += tl.load(b_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    if GATED:
        factor = tl.sum(up_products, axis=0)
        if HAS_BIAS:
            factor += tl.load(b_ptr + N + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        y = activated(y.to(dtype).to(tl.float32), IS_GELU).to(dtype).to(tl.float32)
        y = y * factor.to(dtype).to(tl.float32)
    inside = (n < N)[:, None] & (t < T)[None, :]
    tl.store(y_ptr + t[None, :].to(tl.int64) * N + n[:, None], y.to(dtype), mask=inside)
