# mypy: allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators, allow-untyped-defs, no-warn-return-any
"""Kernels for block-scaled mixture of experts. A *pair* is a token and one of its experts, with index token * k + j.

Pairs are sorted by expert; `ends_ptr` holds the end of each expert's run. As in `multiply`, the weight is the side of
128 rows, and rows beyond the end repeat the last one and are not stored.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernels_blackwell.linear.block_scaled_kernel import operand


@triton.jit
def _find_tile(ends_ptr, tile, E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_T: tl.constexpr):
    """Return a tile's expert (E if none), the tile's start in the sorted pairs, and the end of the expert's run."""
    expert = tl.arange(0, BLOCK_E)
    end = tl.load(ends_ptr + expert, mask=expert < E, other=0)
    begin = tl.load(ends_ptr + expert - 1, mask=(expert > 0) & (expert < E), other=0)
    tiles = tl.cdiv(end - begin, BLOCK_T)
    last = tl.cumsum(tiles, axis=0)
    chosen = tl.sum(((last <= tile) & (expert < E)).to(tl.int32), axis=0)
    mine = expert == chosen
    first = tl.sum(tl.where(mine, begin + (tile - last + tiles) * BLOCK_T, 0), axis=0)
    return chosen, first, tl.sum(tl.where(mine, end, 0), axis=0)


@triton.jit
def gate_up(
    x_ptr,
    x_scale_ptr,
    w_ptr,
    w_scale_ptr,
    x_factor_ptr,
    w_factor_ptr,
    hidden_ptr,
    pairs_ptr,
    ends_ptr,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    PACKED: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """hidden float32 [pairs, N] = silu(gate @ x) * (up @ x), in sorted order. Grid (tiles of N, tiles of pairs)."""
    expert, first, end = _find_tile(ends_ptr, tl.program_id(1), E, BLOCK_E, BLOCK_T)
    if expert < E:
        place = first + tl.arange(0, BLOCK_T)
        token = (tl.load(pairs_ptr + tl.minimum(place, end - 1)) // TOP_K).to(tl.int64)
        column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        row = expert.to(tl.int64) * (2 * N) + tl.minimum(column, N - 1)
        gate_ptrs, gate_scales = operand(
            w_ptr, w_scale_ptr, row, K // PACKED, K // GROUP, PACKED, GROUP, BLOCK_K
        )
        up_ptrs, up_scales = operand(
            w_ptr, w_scale_ptr, row + N, K // PACKED, K // GROUP, PACKED, GROUP, BLOCK_K
        )
        x_ptrs, x_scales = operand(
            x_ptr, x_scale_ptr, token, K // PACKED, K // GROUP, PACKED, GROUP, BLOCK_K
        )
        gate = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
        up = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
        for start in tl.range(0, K, BLOCK_K):
            x = tl.load(x_ptrs + start // PACKED).T
            x_scale = tl.load(x_scales + start // GROUP)
            w = tl.load(gate_ptrs + start // PACKED)
            gate = tl.dot_scaled(
                w, tl.load(gate_scales + start // GROUP), FORMAT, x, x_scale, FORMAT, gate
            )
            w = tl.load(up_ptrs + start // PACKED)
            up = tl.dot_scaled(
                w, tl.load(up_scales + start // GROUP), FORMAT, x, x_scale, FORMAT, up
            )
        if HAS_FACTORS:
            factor = tl.load(x_factor_ptr) * tl.load(w_factor_ptr + expert)
            gate *= factor
            up *= factor
        hidden_ptrs = hidden_ptr + place.to(tl.int64)[None, :] * N + column[:, None]
        hidden = gate / (1.0 + tl.exp(-gate)) * up
        tl.store(hidden_ptrs, hidden, mask=(place < end)[None, :] & (column < N)[:, None])


@triton.jit
def down(
    hidden_ptr,
    hidden_scale_ptr,
    w_ptr,
    w_scale_ptr,
    hidden_factor_ptr,
    w_factor_ptr,
    scaled_ptr,
    pairs_ptr,
    ends_ptr,
    weights_ptr,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    PACKED: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """scaled [pairs, N] = weight * down @ hidden, in the order of tokens. Grid (tiles of N, tiles of pairs)."""
    expert, first, end = _find_tile(ends_ptr, tl.program_id(1), E, BLOCK_E, BLOCK_T)
    if expert < E:
        place = first + tl.arange(0, BLOCK_T)
        used = tl.minimum(place, end - 1)
        pair = tl.load(pairs_ptr + used).to(tl.int64)
        column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        row = expert.to(tl.int64) * N + tl.minimum(column, N - 1)
        w_ptrs, w_scales = operand(
            w_ptr, w_scale_ptr, row, K // PACKED, K // GROUP, PACKED, GROUP, BLOCK_K
        )
        x_ptrs, x_scales = operand(
            hidden_ptr,
            hidden_scale_ptr,
            used.to(tl.int64),
            K // PACKED,
            K // GROUP,
            PACKED,
            GROUP,
            BLOCK_K,
        )
        total = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
        for start in tl.range(0, K, BLOCK_K):
            w = tl.load(w_ptrs + start // PACKED)
            w_scale = tl.load(w_scales + start // GROUP)
            x = tl.load(x_ptrs + start // PACKED).T
            x_scale = tl.load(x_scales + start // GROUP)
            total = tl.dot_scaled(w, w_scale, FORMAT, x, x_scale, FORMAT, total)
        if HAS_FACTORS:
            total *= tl.load(hidden_factor_ptr) * tl.load(w_factor_ptr + expert)
        total *= tl.load(weights_ptr + pair)[None, :]
        scaled_ptrs = scaled_ptr + pair[None, :] * N + column[:, None]
        is_stored = (place < end)[None, :] & (column < N)[:, None]
        tl.store(scaled_ptrs, total.to(scaled_ptr.dtype.element_ty), mask=is_stored)
