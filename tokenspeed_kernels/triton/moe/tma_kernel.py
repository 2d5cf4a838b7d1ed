"""The grouped GEMMs of `gemm_kernel` for many pairs of 16-bit values, with operands loaded by Hopper's TMA.

The tensor memory accelerator (TMA) copies a whole tile with one instruction, so that the warps compute no addresses. It
cannot gather rows, so the threads load the rows of x. TMA pads tiles at the end of a tensor with zeros.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernels.triton import precompile
from tokenspeed_kernels.triton.moe.gemm_kernel import load_features, read_tile


@triton.jit
def _gate_up_tile(
    x_ptr,
    w_desc,
    hidden_ptr,
    pairs_ptr,
    column_tile,
    expert,
    first,
    end,
    x_stride,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute `gate_up` for the sorted pairs from `first` on, BLOCK_M of them or up to `end`."""
    place = first + tl.arange(0, BLOCK_M)
    used = place < end
    # Rows that are not used repeat the last one, and are not stored.
    token = (tl.load(pairs_ptr + tl.minimum(place, end - 1)) // TOP_K).to(tl.int64)
    k = tl.arange(0, BLOCK_K)[None, :]
    x_ptrs = x_ptr + token[:, None] * x_stride + k
    both = tl.zeros([BLOCK_M, 2 * BLOCK_N], dtype=tl.float32)
    for start in tl.range(0, K, BLOCK_K):
        x = load_features(x_ptrs, k, start, K, BLOCK_K)
        w = w_desc.load([expert, 0, column_tile * BLOCK_N, start])
        both = tl.dot(x, tl.trans(tl.reshape(w, [2 * BLOCK_N, BLOCK_K])), both)
    gate, up = tl.split(tl.permute(tl.reshape(both, [BLOCK_M, 2, BLOCK_N]), (0, 2, 1)))
    activated = ((gate / (1.0 + tl.exp(-gate))) * up).to(hidden_ptr.dtype.element_ty)
    column = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    at = hidden_ptr + place.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(at, activated, mask=used[:, None] & (column < N)[None, :])


@precompile.jit
def gate_up(
    x_ptr,
    w_desc,
    hidden_ptr,
    pairs_ptr,
    tiles_ptr,
    x_stride,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TOGETHER: tl.constexpr,
    HALVES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute the same as `gemm_kernel.gate_up`, with a descriptor of the weights [E, 2, N, K].

    A tile [1, 2, BLOCK_N, BLOCK_K] has rows of gate and of up, which are one operand.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    column_tile, expert, first, end = read_tile(tiles_ptr, TOGETHER)
    if expert < E:
        if HALVES and end - first <= BLOCK_M // 2:
            _gate_up_tile(
                x_ptr,
                w_desc,
                hidden_ptr,
                pairs_ptr,
                column_tile,
                expert,
                first,
                end,
                x_stride,
                TOP_K,
                N,
                K,
                BLOCK_M // 2,
                BLOCK_N,
                BLOCK_K,
            )
        else:
            _gate_up_tile(
                x_ptr,
                w_desc,
                hidden_ptr,
                pairs_ptr,
                column_tile,
                expert,
                first,
                end,
                x_stride,
                TOP_K,
                N,
                K,
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
            )


@triton.jit
def _down_tile(
    hidden_ptr,
    hidden_desc,
    w_desc,
    scaled_ptr,
    pairs_ptr,
    weights_ptr,
    column_tile,
    expert,
    first,
    end,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute `down` for the sorted pairs from `first` on, BLOCK_M of them or up to `end`.

    The threads load the rows of hidden if their descriptor is None. Otherwise a tile may have rows of the next expert,
    which are not stored.
    """
    place = first + tl.arange(0, BLOCK_M)
    used = place < end
    place = tl.minimum(place, end - 1)
    k = tl.arange(0, BLOCK_K)[None, :]
    hidden_ptrs = hidden_ptr + place.to(tl.int64)[:, None] * K + k
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in tl.range(0, K, BLOCK_K):
        if hidden_desc is None:
            hidden = load_features(hidden_ptrs, k, start, K, BLOCK_K)
        else:
            hidden = hidden_desc.load([first, start])
        w = w_desc.load([expert, column_tile * BLOCK_N, start])
        acc = tl.dot(hidden, tl.trans(tl.reshape(w, [BLOCK_N, BLOCK_K])), acc)
    pair = tl.load(pairs_ptr + place).to(tl.int64)
    acc = acc * tl.load(weights_ptr + pair)[:, None]
    column = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    at = scaled_ptr + pair[:, None] * N + column[None, :]
    tl.store(at, acc.to(scaled_ptr.dtype.element_ty), mask=used[:, None] & (column < N)[None, :])


@precompile.jit
def down(
    hidden_ptr,
    hidden_desc,
    w_desc,
    scaled_ptr,
    pairs_ptr,
    tiles_ptr,
    weights_ptr,
    E: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TOGETHER: tl.constexpr,
    HALVES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute the same as `gemm_kernel.down`, with descriptors of hidden [P, K] and of the weights [E, N, K].

    Their tiles are [BLOCK_M, BLOCK_K] and [1, BLOCK_N, BLOCK_K].
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    column_tile, expert, first, end = read_tile(tiles_ptr, TOGETHER)
    if expert < E:
        if HALVES and end - first <= BLOCK_M // 2:
            _down_tile(
                hidden_ptr,
                None,
                w_desc,
                scaled_ptr,
                pairs_ptr,
                weights_ptr,
                column_tile,
                expert,
                first,
                end,
                N,
                K,
                BLOCK_M // 2,
                BLOCK_N,
                BLOCK_K,
            )
        else:
            _down_tile(
                hidden_ptr,
                hidden_desc,
                w_desc,
                scaled_ptr,
                pairs_ptr,
                weights_ptr,
                column_tile,
                expert,
                first,
                end,
                N,
                K,
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
            )
