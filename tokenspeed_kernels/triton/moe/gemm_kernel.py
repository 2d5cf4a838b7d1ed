"""The two grouped GEMMs of routed experts. A program computes a tile of the pairs of one expert (see `sort_by_expert`).

SCALES of FP8 and INT8 operands: "channel" for one per row of x and of a weight, "block" for one per BLOCK_K features
of a row of x and per BLOCK_K x BLOCK_K block of a weight, or "none".
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernels.triton import precompile


@triton.jit
def load_features(ptrs, k, start, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load BLOCK_K features from `start` on. `k` are their indices in a block, in the shape of one row or column."""
    if K % BLOCK_K == 0:
        values = tl.load(ptrs + start)
    else:
        values = tl.load(ptrs + start, mask=k < K - start, other=0.0)
    return values


@triton.jit
def _zeros(w_ptr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WEIGHTS_FIRST: tl.constexpr):
    """Return an empty accumulator for the dtype of the weight."""
    DTYPE: tl.constexpr = tl.int32 if w_ptr.dtype.element_ty == tl.int8 else tl.float32
    if WEIGHTS_FIRST:
        acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=DTYPE)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=DTYPE)
    return acc


@triton.jit
def _multiply(
    acc,
    x,
    w,
    x_scale,
    w_scale,
    WEIGHTS_FIRST: tl.constexpr,
    PRECISION: tl.constexpr,
    MAX_INEXACT: tl.constexpr,
):
    """Add x [M, K] @ w [N, K].T to acc [M, N], or w @ x.T to acc [N, M].

    Unless the scales are None, the product is multiplied with `x_scale` [M] and `w_scale`, a scalar or [1, N].
    """
    if WEIGHTS_FIRST:
        left, right = w, tl.trans(x)
    else:
        left, right = x, tl.trans(w)
    if x_scale is None:
        acc = tl.dot(
            left,
            right,
            acc,
            input_precision=PRECISION,
            max_num_imprecise_acc=MAX_INEXACT,
            out_dtype=acc.dtype,
        )
    else:
        acc += tl.dot(left, right) * (_across(x_scale, WEIGHTS_FIRST) * w_scale)
    return acc


@triton.jit
def _across(of_pairs, WEIGHTS_FIRST: tl.constexpr):
    """Return a value per pair [M] in the shape that an accumulator is multiplied with."""
    return of_pairs[None, :] if WEIGHTS_FIRST else of_pairs[:, None]


@triton.jit
def _next_group(start, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return the group of features after the one at `start`, or the last.

    The scales of a group are loaded one iteration early, so that its product does not wait for them.
    """
    return tl.minimum(start // BLOCK_K + 1, (K - 1) // BLOCK_K)


@triton.jit
def _scale_channels(acc, x_scale, w_scale, WEIGHTS_FIRST: tl.constexpr):
    """Return the accumulator, float32, times the scales of the pairs [M] and of the weight's rows [N]."""
    scale = _across(x_scale, WEIGHTS_FIRST) * _across(w_scale, not WEIGHTS_FIRST)
    return acc.to(tl.float32) * scale


@triton.jit
def _place_in_grid(TOGETHER: tl.constexpr):
    """Return the tile of columns and the tile of pairs of this program, for a grid (tiles of columns, tiles of pairs).

    Programs for TOGETHER consecutive tiles of pairs are neighbors, so that they share a weight tile in the L2 cache.
    """
    column_tile, tile = tl.program_id(0), tl.program_id(1)
    if TOGETHER > 1:
        num_columns = tl.num_programs(0)
        index = tile * num_columns + column_tile
        band = index // (TOGETHER * num_columns) * TOGETHER
        height = tl.minimum(tl.num_programs(1) - band, TOGETHER)
        within = index - band * num_columns
        column_tile, tile = within // height, band + within % height
    return column_tile, tile


@triton.jit
def read_tile(tiles_ptr, TOGETHER: tl.constexpr):
    """Return this program's tile of columns, expert (E: none), first sorted pair, and the end of the expert's run."""
    column_tile, tile = _place_in_grid(TOGETHER)
    tile_ptr = tiles_ptr + tile * 3
    return column_tile, tl.load(tile_ptr), tl.load(tile_ptr + 1), tl.load(tile_ptr + 2)


@triton.jit
def _gate_up_tile(
    x_ptr,
    x_scale_ptr,
    w_ptr,
    w_scale_ptr,
    hidden_ptr,
    pairs_ptr,
    column_tile,
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
    JOINED: tl.constexpr,
    PRECISION: tl.constexpr,
    SCALES: tl.constexpr,
    MAX_INEXACT: tl.constexpr,
):
    """Compute `gate_up` for the sorted pairs from `first` on, BLOCK_M of them or up to `end`."""
    place = first + tl.arange(0, BLOCK_M)
    used = place < end
    # Rows that are not used repeat the last one, and are not stored.
    token = (tl.load(pairs_ptr + tl.minimum(place, end - 1)) // TOP_K).to(tl.int64)
    column = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)[None, :]
    x_ptrs = x_ptr + token[:, None] * x_stride + k
    x_scale, gate_scale, up_scale = None, None, None
    if SCALES == "channel":
        x_scale_ptrs = x_scale_ptr + token
    elif SCALES == "block":
        num_groups: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
        x_scale_ptrs = x_scale_ptr + token * num_groups
        block_row = expert.to(tl.int64) * (2 * N // BLOCK_K) + column_tile * BLOCK_N // BLOCK_K
        gate_scale_ptr = w_scale_ptr + block_row * num_groups
        up_scale_ptr = gate_scale_ptr + N // BLOCK_K * num_groups
        x_scale = tl.load(x_scale_ptrs)
        gate_scale, up_scale = tl.load(gate_scale_ptr), tl.load(up_scale_ptr)
    if JOINED:
        index = tl.arange(0, 2 * BLOCK_N)
        row = column_tile * BLOCK_N + index // 2
        row = (tl.where(row < N, row, 0) + index % 2 * N).to(tl.int64)
        w_ptrs = w_ptr + expert.to(tl.int64) * w_stride_e + row[:, None] * w_stride_n + k
        both = _zeros(w_ptr, BLOCK_M, 2 * BLOCK_N, WEIGHTS_FIRST)
        for start in tl.range(0, K, BLOCK_K):
            now_x, now_w = x_scale, None
            if SCALES == "block":
                now_w = tl.where(index % 2 == 0, gate_scale, up_scale)[None, :]
                group = _next_group(start, K, BLOCK_K)
                x_scale = tl.load(x_scale_ptrs + group)
                gate_scale = tl.load(gate_scale_ptr + group)
                up_scale = tl.load(up_scale_ptr + group)
            x = load_features(x_ptrs, k, start, K, BLOCK_K)
            w = load_features(w_ptrs, k, start, K, BLOCK_K)
            both = _multiply(both, x, w, now_x, now_w, WEIGHTS_FIRST, PRECISION, MAX_INEXACT)
        if SCALES == "channel":
            w_scale = tl.load(w_scale_ptr + expert.to(tl.int64) * (2 * N) + row)
            both = _scale_channels(both, tl.load(x_scale_ptrs), w_scale, WEIGHTS_FIRST)
        gate, up = tl.split(tl.reshape(both, [BLOCK_M, BLOCK_N, 2]))
    else:
        row = tl.where(column < N, column, 0).to(tl.int64)
        gate_ptrs = w_ptr + expert.to(tl.int64) * w_stride_e + row[:, None] * w_stride_n + k
        up_ptrs = gate_ptrs + N * w_stride_n
        gate = _zeros(w_ptr, BLOCK_M, BLOCK_N, WEIGHTS_FIRST)
        up = gate
        for start in tl.range(0, K, BLOCK_K):
            now_x, now_gate, now_up = x_scale, gate_scale, up_scale
            if SCALES == "block":
                group = _next_group(start, K, BLOCK_K)
                x_scale = tl.load(x_scale_ptrs + group)
                gate_scale = tl.load(gate_scale_ptr + group)
                up_scale = tl.load(up_scale_ptr + group)
            x = load_features(x_ptrs, k, start, K, BLOCK_K)
            gate_w = load_features(gate_ptrs, k, start, K, BLOCK_K)
            up_w = load_features(up_ptrs, k, start, K, BLOCK_K)
            gate = _multiply(
                gate, x, gate_w, now_x, now_gate, WEIGHTS_FIRST, PRECISION, MAX_INEXACT
            )
            up = _multiply(up, x, up_w, now_x, now_up, WEIGHTS_FIRST, PRECISION, MAX_INEXACT)
        if SCALES == "channel":
            x_scale = tl.load(x_scale_ptrs)
            gate_scale_ptrs = w_scale_ptr + expert.to(tl.int64) * (2 * N) + row
            gate = _scale_channels(gate, x_scale, tl.load(gate_scale_ptrs), WEIGHTS_FIRST)
            up = _scale_channels(up, x_scale, tl.load(gate_scale_ptrs + N), WEIGHTS_FIRST)
    activated = ((gate / (1.0 + tl.exp(-gate))) * up).to(hidden_ptr.dtype.element_ty)
    if WEIGHTS_FIRST:
        activated = tl.trans(activated)
    at = hidden_ptr + place.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(at, activated, mask=used[:, None] & (column < N)[None, :])


@precompile.jit
def gate_up(
    x_ptr,
    x_scale_ptr,
    w_ptr,
    w_scale_ptr,
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
    JOINED: tl.constexpr,
    PRECISION: tl.constexpr,
    SCALES: tl.constexpr,
    MAX_INEXACT: tl.constexpr,
    TOGETHER: tl.constexpr,
    HALVES: tl.constexpr,
    PDL: tl.constexpr,
):
    """hidden [pairs, N] = silu(x @ gate) * (x @ up), in sorted order. Grid (tiles of N, tiles of pairs).

    WEIGHTS_FIRST: the weights are the left operand, whose tile needs 64 rows for Hopper's wide instructions.
    JOINED: rows of gate and up alternate in one right operand, which is twice as wide.
    HALVES: a tile that is at most half full is computed as one of half the size.
    PDL: the next kernel may read what the one before this has written, because it starts after this one's wait.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    column_tile, expert, first, end = read_tile(tiles_ptr, TOGETHER)
    if expert < E:
        if HALVES and end - first <= BLOCK_M // 2:
            _gate_up_tile(
                x_ptr,
                x_scale_ptr,
                w_ptr,
                w_scale_ptr,
                hidden_ptr,
                pairs_ptr,
                column_tile,
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
                JOINED,
                PRECISION,
                SCALES,
                MAX_INEXACT,
            )
        else:
            _gate_up_tile(
                x_ptr,
                x_scale_ptr,
                w_ptr,
                w_scale_ptr,
                hidden_ptr,
                pairs_ptr,
                column_tile,
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
                JOINED,
                PRECISION,
                SCALES,
                MAX_INEXACT,
            )


@triton.jit
def _down_tile(
    hidden_ptr,
    hidden_scale_ptr,
    w_ptr,
    w_scale_ptr,
    scaled_ptr,
    pairs_ptr,
    weights_ptr,
    column_tile,
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
    SCALES: tl.constexpr,
    MAX_INEXACT: tl.constexpr,
):
    """Compute `down` for the sorted pairs from `first` on, BLOCK_M of them or up to `end`."""
    place = first + tl.arange(0, BLOCK_M)
    used = place < end
    place = tl.minimum(place, end - 1)
    column = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.where(column < N, column, 0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)[None, :]
    hidden_ptrs = hidden_ptr + place.to(tl.int64)[:, None] * K + k
    w_ptrs = w_ptr + expert.to(tl.int64) * w_stride_e + row[:, None] * w_stride_n + k
    scale, block_scale = None, None
    if SCALES == "channel":
        scale_ptrs = hidden_scale_ptr + place
    elif SCALES == "block":
        num_groups: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
        scale_ptrs = hidden_scale_ptr + place.to(tl.int64) * num_groups
        num_rows: tl.constexpr = (N + BLOCK_K - 1) // BLOCK_K
        block_row = expert.to(tl.int64) * num_rows + column_tile * BLOCK_N // BLOCK_K
        block_scale_ptr = w_scale_ptr + block_row * num_groups
        scale, block_scale = tl.load(scale_ptrs), tl.load(block_scale_ptr)
    acc = _zeros(w_ptr, BLOCK_M, BLOCK_N, WEIGHTS_FIRST)
    for start in tl.range(0, K, BLOCK_K):
        now, now_block = scale, block_scale
        if SCALES == "block":
            group = _next_group(start, K, BLOCK_K)
            scale, block_scale = tl.load(scale_ptrs + group), tl.load(block_scale_ptr + group)
        hidden = load_features(hidden_ptrs, k, start, K, BLOCK_K)
        w = load_features(w_ptrs, k, start, K, BLOCK_K)
        acc = _multiply(acc, hidden, w, now, now_block, WEIGHTS_FIRST, PRECISION, MAX_INEXACT)
    if SCALES == "channel":
        w_scale = tl.load(w_scale_ptr + expert.to(tl.int64) * N + row)
        acc = _scale_channels(acc, tl.load(scale_ptrs), w_scale, WEIGHTS_FIRST)
    if WEIGHTS_FIRST:
        acc = tl.trans(acc)
    pair = tl.load(pairs_ptr + place).to(tl.int64)
    acc = acc * tl.load(weights_ptr + pair)[:, None]
    at = scaled_ptr + pair[:, None] * N + column[None, :]
    tl.store(at, acc.to(scaled_ptr.dtype.element_ty), mask=used[:, None] & (column < N)[None, :])


@precompile.jit
def down(
    hidden_ptr,
    hidden_scale_ptr,
    w_ptr,
    w_scale_ptr,
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
    SCALES: tl.constexpr,
    MAX_INEXACT: tl.constexpr,
    TOGETHER: tl.constexpr,
    HALVES: tl.constexpr,
    PDL: tl.constexpr,
):
    """scaled [pairs, N] = weight * hidden @ down, in the order of tokens. Grid (tiles of N, tiles of pairs)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    column_tile, expert, first, end = read_tile(tiles_ptr, TOGETHER)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if expert < E:
        if HALVES and end - first <= BLOCK_M // 2:
            _down_tile(
                hidden_ptr,
                hidden_scale_ptr,
                w_ptr,
                w_scale_ptr,
                scaled_ptr,
                pairs_ptr,
                weights_ptr,
                column_tile,
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
                SCALES,
                MAX_INEXACT,
            )
        else:
            _down_tile(
                hidden_ptr,
                hidden_scale_ptr,
                w_ptr,
                w_scale_ptr,
                scaled_ptr,
                pairs_ptr,
                weights_ptr,
                column_tile,
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
                SCALES,
                MAX_INEXACT,
            )
