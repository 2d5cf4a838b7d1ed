"""The two grouped GEMMs of routed experts. A program computes a tile of the pairs of one expert (see `sort_by_expert`)."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernels.triton import precompile


@triton.jit
def _load(ptrs, k, start, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load BLOCK_K features from `start` on. `k` are their indices in a block, in the shape of one row or column."""
    if K % BLOCK_K == 0:
        values = tl.load(ptrs + start)
    else:
        values = tl.load(ptrs + start, mask=k < K - start, other=0.0)
    return values


@triton.jit
def _multiply(acc, x, w, WEIGHTS_FIRST: tl.constexpr, PRECISION: tl.constexpr):
    """Add x [M, K] @ w [N, K].T to acc [M, N], or w @ x.T to acc [N, M]."""
    if WEIGHTS_FIRST:
        acc = tl.dot(w, tl.trans(x), acc, input_precision=PRECISION)
    else:
        acc = tl.dot(x, tl.trans(w), acc, input_precision=PRECISION)
    return acc


@triton.jit
def _gate_up_tile(
    x_ptr,
    w_ptr,
    hidden_ptr,
    pairs_ptr,
    expert,
    first,
    end,
    x_stride,
    w_stride_e,
    w_stride_n,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute `gate_up` for the sorted pairs from `first` on, BLOCK_M of them or up to `end`."""
    place = first + tl.arange(0, BLOCK_M)
    used = place < end
    # Rows that are not used repeat the last one, and are not stored.
    token = (tl.load(pairs_ptr + tl.minimum(place, end - 1)) // TOP_K).to(tl.int64)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.where(column < N, column, 0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)[None, :]
    x_ptrs = x_ptr + token[:, None] * x_stride + k
    gate_ptrs = w_ptr + expert.to(tl.int64) * w_stride_e + row[:, None] * w_stride_n + k
    up_ptrs = gate_ptrs + N * w_stride_n
    if WEIGHTS_FIRST:
        gate = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    else:
        gate = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    up = gate
    for start in tl.range(0, K, BLOCK_K):
        x = _load(x_ptrs, k, start, K, BLOCK_K)
        gate_w = _load(gate_ptrs, k, start, K, BLOCK_K)
        up_w = _load(up_ptrs, k, start, K, BLOCK_K)
        gate = _multiply(gate, x, gate_w, WEIGHTS_FIRST, PRECISION)
        up = _multiply(up, x, up_w, WEIGHTS_FIRST, PRECISION)
    activated = ((gate / (1.0 + tl.exp(-gate))) * up).to(hidden_ptr.dtype.element_ty)
    if WEIGHTS_FIRST:
        activated = tl.trans(activated)
    at = hidden_ptr + place.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(at, activated, mask=used[:, None] & (column < N)[None, :])


@precompile.jit
def gate_up(
    x_ptr,
    w_ptr,
    hidden_ptr,
    pairs_ptr,
    tiles_ptr,
    x_stride,
    w_stride_e,
    w_stride_n,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """hidden [pairs, N] = silu(x @ gate) * (x @ up), in sorted order. Grid (tiles of N, tiles of pairs).

    WEIGHTS_FIRST: the weights are the left operand, whose tile has to have 64 rows for the fast instruction.
    A large tile that is at most half full is computed as one of half the size.
    PDL: the next kernel may read what the one before this has written, because it starts after this one's wait.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(1) * 3
    expert = tl.load(tiles_ptr + tile)
    first, end = tl.load(tiles_ptr + tile + 1), tl.load(tiles_ptr + tile + 2)
    if expert < E:
        if BLOCK_M >= 128 and end - first <= BLOCK_M // 2:
            _gate_up_tile(
                x_ptr,
                w_ptr,
                hidden_ptr,
                pairs_ptr,
                expert,
                first,
                end,
                x_stride,
                w_stride_e,
                w_stride_n,
                TOP_K,
                N,
                K,
                BLOCK_M // 2,
                BLOCK_N,
                BLOCK_K,
                WEIGHTS_FIRST,
                PRECISION,
            )
        else:
            _gate_up_tile(
                x_ptr,
                w_ptr,
                hidden_ptr,
                pairs_ptr,
                expert,
                first,
                end,
                x_stride,
                w_stride_e,
                w_stride_n,
                TOP_K,
                N,
                K,
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
                WEIGHTS_FIRST,
                PRECISION,
            )


@triton.jit
def _down_tile(
    hidden_ptr,
    w_ptr,
    scaled_ptr,
    pairs_ptr,
    weights_ptr,
    expert,
    first,
    end,
    w_stride_e,
    w_stride_n,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute `down` for the sorted pairs from `first` on, BLOCK_M of them or up to `end`."""
    place = first + tl.arange(0, BLOCK_M)
    used = place < end
    place = tl.minimum(place, end - 1)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.where(column < N, column, 0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)[None, :]
    hidden_ptrs = hidden_ptr + place.to(tl.int64)[:, None] * K + k
    w_ptrs = w_ptr + expert.to(tl.int64) * w_stride_e + row[:, None] * w_stride_n + k
    if WEIGHTS_FIRST:
        acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in tl.range(0, K, BLOCK_K):
        hidden = _load(hidden_ptrs, k, start, K, BLOCK_K)
        w = _load(w_ptrs, k, start, K, BLOCK_K)
        acc = _multiply(acc, hidden, w, WEIGHTS_FIRST, PRECISION)
    if WEIGHTS_FIRST:
        acc = tl.trans(acc)
    pair = tl.load(pairs_ptr + place).to(tl.int64)
    acc = acc * tl.load(weights_ptr + pair)[:, None]
    at = scaled_ptr + pair[:, None] * N + column[None, :]
    tl.store(at, acc.to(scaled_ptr.dtype.element_ty), mask=used[:, None] & (column < N)[None, :])


@precompile.jit
def down(
    hidden_ptr,
    w_ptr,
    scaled_ptr,
    pairs_ptr,
    tiles_ptr,
    weights_ptr,
    w_stride_e,
    w_stride_n,
    E: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """scaled [pairs, N] = weight * hidden @ down, in the order of tokens. Grid (tiles of N, tiles of pairs)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(1) * 3
    expert = tl.load(tiles_ptr + tile)
    first, end = tl.load(tiles_ptr + tile + 1), tl.load(tiles_ptr + tile + 2)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if expert < E:
        if BLOCK_M >= 128 and end - first <= BLOCK_M // 2:
            _down_tile(
                hidden_ptr,
                w_ptr,
                scaled_ptr,
                pairs_ptr,
                weights_ptr,
                expert,
                first,
                end,
                w_stride_e,
                w_stride_n,
                N,
                K,
                BLOCK_M // 2,
                BLOCK_N,
                BLOCK_K,
                WEIGHTS_FIRST,
                PRECISION,
            )
        else:
            _down_tile(
                hidden_ptr,
                w_ptr,
                scaled_ptr,
                pairs_ptr,
                weights_ptr,
                expert,
                first,
                end,
                w_stride_e,
                w_stride_n,
                N,
                K,
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
                WEIGHTS_FIRST,
                PRECISION,
            )
