"""Kernels for mixture of experts. A *pair* is a token and one of its experts, with index token * k + j.

A pair of the expert E, which does not exist, is not computed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernels.triton import precompile


@precompile.jit
def route(
    logits_ptr,
    bias_ptr,
    weights_ptr,
    ids_ptr,
    stride,
    scale,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_E: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SCORE: tl.constexpr,
    SUMS_TWO: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Score a token's experts, drop all but the best groups, and take the top k by repeated maximum. Grid (T).

    The experts are a tile [BLOCK_G, BLOCK_E] of groups and their members.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_E)
    expert = group[:, None] * (E // GROUPS) + member[None, :]
    exists = (group < GROUPS)[:, None] & (member < E // GROUPS)[None, :]
    nothing = float("-inf")
    score = tl.load(logits_ptr + row * stride + expert, mask=exists, other=nothing).to(tl.float32)
    if SCORE == "softmax":
        score = tl.exp(score - tl.max(tl.max(score, axis=1), axis=0))
        score = score / tl.sum(tl.sum(score, axis=1), axis=0)
    elif SCORE == "sigmoid":
        score = 1.0 / (1.0 + tl.exp(-score))
    left = score
    if bias_ptr is not None:
        left += tl.load(bias_ptr + expert, mask=exists, other=0.0)
    left = tl.where(exists, left, nothing)
    if TOP_GROUPS < GROUPS:
        of_group = tl.max(left, axis=1)
        if SUMS_TWO:
            best = tl.min(tl.where(left == of_group[:, None], member[None, :], BLOCK_E), axis=1)
            others = tl.where(member[None, :] == best[:, None], nothing, left)
            of_group += tl.max(others, axis=1)
        is_in = tl.zeros([BLOCK_G], dtype=tl.int32)
        for _ in tl.static_range(TOP_GROUPS):
            best = tl.max(of_group, axis=0)
            chosen = tl.min(tl.where(of_group == best, group, GROUPS - 1), axis=0)
            is_in = tl.where(group == chosen, 1, is_in)
            of_group = tl.where(group == chosen, nothing, of_group)
        left = tl.where((is_in == 1)[:, None], left, nothing)
    rank = tl.arange(0, BLOCK_K)
    weights = tl.zeros([BLOCK_K], dtype=tl.float32)
    ids = tl.zeros([BLOCK_K], dtype=tl.int32)
    for j in tl.static_range(TOP_K):
        best = tl.max(tl.max(left, axis=1), axis=0)
        # E - 1 as the default keeps ids in range for rows of NaN.
        chosen = tl.min(tl.min(tl.where(left == best, expert, E - 1), axis=1), axis=0)
        is_chosen = (expert == chosen) & exists
        weight = tl.sum(tl.sum(tl.where(is_chosen, score, 0.0), axis=1), axis=0)
        weights = tl.where(rank == j, weight, weights)
        ids = tl.where(rank == j, chosen, ids)
        left = tl.where(is_chosen, nothing, left)
    if SCORE == "top_k_softmax":
        weights = tl.where(rank < TOP_K, weights, nothing)
        weights = tl.exp(weights - tl.max(weights, axis=0))
        weights = weights / tl.sum(weights, axis=0)
    if RENORMALIZE:
        weights = weights / (tl.sum(weights, axis=0) + 1e-20)
    tl.store(weights_ptr + row * TOP_K + rank, weights * scale, mask=rank < TOP_K)
    tl.store(ids_ptr + row * TOP_K + rank, ids, mask=rank < TOP_K)


@precompile.jit(do_not_specialize=["num_pairs"])
def sort_small(
    ids_ptr,
    pairs_ptr,
    counts_ptr,
    num_pairs,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Stable sort of up to BLOCK pairs by expert in one program; also counts the pairs of each expert.

    Pairs without an expert come last and are not counted.
    """
    index = tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + index, mask=index < num_pairs, other=BLOCK_E)
    ordered = tl.sort(ids * BLOCK + index)
    tl.store(pairs_ptr + index, ordered % BLOCK, mask=index < num_pairs)
    expert = tl.arange(0, BLOCK_E)
    counts = tl.histogram(tl.minimum(ids, BLOCK_E - 1), BLOCK_E, mask=ids < E)
    tl.store(counts_ptr + expert, counts, mask=expert < E)


@precompile.jit(do_not_specialize=["num_pairs"])
def count(ids_ptr, counts_ptr, num_pairs, E: tl.constexpr, BLOCK: tl.constexpr):
    """Add the pairs of each expert to counts."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + index, mask=index < num_pairs, other=E)
    tl.atomic_add(counts_ptr + ids, 1, mask=ids < E)


@precompile.jit(do_not_specialize=["num_pairs"])
def place(
    ids_ptr,
    pairs_ptr,
    counts_ptr,
    cursors_ptr,
    num_pairs,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write each pair to its expert's run, in any order within the run. Pairs without an expert are not written."""
    expert = tl.arange(0, BLOCK_E)
    counts = tl.load(counts_ptr + expert, mask=expert < E, other=0)
    starts = tl.cumsum(counts, axis=0) - counts
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + index, mask=index < num_pairs, other=E)
    mask = ids < E
    ids = tl.where(mask, ids, 0)
    rank = tl.atomic_add(cursors_ptr + ids, 1, mask=mask)
    tl.store(pairs_ptr + tl.gather(starts, ids, 0) + rank, index, mask=mask)


@triton.jit
def find_tile(counts_ptr, tile, E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return a tile's expert, the tile's start in the sorted pairs, and the end of the expert's run."""
    expert = tl.arange(0, BLOCK_E)
    counts = tl.load(counts_ptr + expert, mask=expert < E, other=0)
    tiles = tl.cdiv(counts, BLOCK_M)
    ends = tl.cumsum(tiles, axis=0)
    chosen = tl.sum((ends <= tile).to(tl.int32), axis=0)
    mine = expert == chosen
    begin = tl.sum(tl.where(mine, tl.cumsum(counts, axis=0) - counts, 0), axis=0)
    count = tl.sum(tl.where(mine, counts, 0), axis=0)
    first = begin + (tile - tl.sum(tl.where(mine, ends - tiles, 0), axis=0)) * BLOCK_M
    return chosen, first, begin + count


@precompile.jit
def gate_up(
    x_ptr,
    w_ptr,
    hidden_ptr,
    pairs_ptr,
    counts_ptr,
    x_stride,
    w_stride_e,
    w_stride_n,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """hidden [pairs, N] = silu(x @ gate) * (x @ up), in sorted order. Grid (tiles of N, tiles of pairs)."""
    expert, first, end = find_tile(counts_ptr, tl.program_id(1), E, BLOCK_E, BLOCK_M)
    if expert < E:
        place = first + tl.arange(0, BLOCK_M)
        used = place < end
        token = (tl.load(pairs_ptr + place, mask=used, other=0) // TOP_K).to(tl.int64)
        column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        row = tl.where(column < N, column, 0).to(tl.int64)
        k = tl.arange(0, BLOCK_K)
        x_ptrs = x_ptr + token[:, None] * x_stride + k[None, :]
        gate_ptrs = (
            w_ptr + expert.to(tl.int64) * w_stride_e + row[None, :] * w_stride_n + k[:, None]
        )
        up_ptrs = gate_ptrs + N * w_stride_n
        gate = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        for start in tl.range(0, K, BLOCK_K):
            inside = k < K - start
            x = tl.load(x_ptrs + start, mask=used[:, None] & inside[None, :], other=0.0)
            gate_w = tl.load(gate_ptrs + start, mask=inside[:, None], other=0.0)
            up_w = tl.load(up_ptrs + start, mask=inside[:, None], other=0.0)
            gate = tl.dot(x, gate_w, gate, input_precision=PRECISION)
            up = tl.dot(x, up_w, up, input_precision=PRECISION)
        dtype: tl.constexpr = hidden_ptr.dtype.element_ty
        activated = (gate / (1.0 + tl.exp(-gate))) * up
        at = hidden_ptr + place.to(tl.int64)[:, None] * N + column[None, :]
        tl.store(at, activated.to(dtype), mask=used[:, None] & (column < N)[None, :])


@precompile.jit
def down(
    hidden_ptr,
    w_ptr,
    scaled_ptr,
    pairs_ptr,
    counts_ptr,
    weights_ptr,
    w_stride_e,
    w_stride_n,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """scaled [pairs, N] = weight * hidden @ down, in the order of tokens. Grid (tiles of N, tiles of pairs)."""
    expert, first, end = find_tile(counts_ptr, tl.program_id(1), E, BLOCK_E, BLOCK_M)
    if expert < E:
        place = first + tl.arange(0, BLOCK_M)
        used = place < end
        pair = tl.load(pairs_ptr + place, mask=used, other=0).to(tl.int64)
        column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        row = tl.where(column < N, column, 0).to(tl.int64)
        k = tl.arange(0, BLOCK_K)
        hidden_ptrs = hidden_ptr + place.to(tl.int64)[:, None] * K + k[None, :]
        w_ptrs = w_ptr + expert.to(tl.int64) * w_stride_e + row[None, :] * w_stride_n + k[:, None]
        acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        for start in tl.range(0, K, BLOCK_K):
            inside = k < K - start
            hidden = tl.load(hidden_ptrs + start, mask=used[:, None] & inside[None, :], other=0.0)
            w = tl.load(w_ptrs + start, mask=inside[:, None], other=0.0)
            acc = tl.dot(hidden, w, acc, input_precision=PRECISION)
        acc = acc * tl.load(weights_ptr + pair, mask=used, other=0.0)[:, None]
        at = scaled_ptr + pair[:, None] * N + column[None, :]
        tl.store(
            at, acc.to(scaled_ptr.dtype.element_ty), mask=used[:, None] & (column < N)[None, :]
        )


@precompile.jit
def add_pairs(
    scaled_ptr,
    ids_ptr,
    y_ptr,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """y [T, N] = the sum over a token's pairs with an expert, always in the same order. Grid (T, tiles of N)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for j in tl.static_range(TOP_K):
        pair = token * TOP_K + j
        # Not a conjunction of both conditions: the interpreter of Triton 3.9 cannot combine a block
        # of booleans with a scalar.
        mask = column < tl.where(tl.load(ids_ptr + pair) < E, N, 0)
        total += tl.load(scaled_ptr + pair * N + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + token * N + column, total.to(y_ptr.dtype.element_ty), mask=column < N)
