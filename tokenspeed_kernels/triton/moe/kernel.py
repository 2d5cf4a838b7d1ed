"""Kernels for mixture of experts. A *pair* is a token and one of its experts, with index token * k + j.

The expert id E, which is the number of experts, means "no expert": kernels skip such a pair.
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


@triton.jit
def _write_tiles(
    tiles_ptr,
    counts,
    num_tiles,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """tiles [num_tiles, 3] = each tile's expert (E: none), its start in the sorted pairs, and the end of the run.

    The GEMMs read this table, so that their programs start with the loads of their operands. counts [BLOCK_E] are the
    pairs per expert.
    """
    expert = tl.arange(0, BLOCK_E)
    nums = tl.cdiv(counts, BLOCK_M)
    first_tile = tl.cumsum(nums, axis=0) - nums
    end = tl.cumsum(counts, axis=0)
    begin = end - counts
    for index in range(tl.max(nums, axis=0)):
        at, used = tiles_ptr + (first_tile + index) * 3, index < nums
        tl.store(at, expert, mask=used)
        tl.store(at + 1, begin + index * BLOCK_M, mask=used)
        tl.store(at + 2, end, mask=used)
    for start in range(tl.sum(nums, axis=0), num_tiles, BLOCK_E):
        tile = start + expert
        tl.store(tiles_ptr + tile * 3, tl.full([BLOCK_E], E, tl.int32), mask=tile < num_tiles)


@precompile.jit(do_not_specialize=["num_pairs", "num_tiles"])
def sort_small(
    ids_ptr,
    pairs_ptr,
    counts_ptr,
    cursors_ptr,
    tiles_ptr,
    num_pairs,
    num_tiles,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PDL: tl.constexpr,
):
    """Group up to BLOCK pairs by expert in one program, in any order within an expert's run, and count them.

    Pairs without an expert are neither written nor counted. `cursors` [E] is scratch memory. Also writes the table of
    tiles of BLOCK_M pairs, unless it is None. (`tl.sort` takes 84 µs.)
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    index = tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + index, mask=index < num_pairs, other=E)
    mask, expert = ids < E, tl.arange(0, BLOCK_E)
    counts = tl.histogram(tl.minimum(ids, BLOCK_E - 1), BLOCK_E, mask=mask)
    tl.store(counts_ptr + expert, counts, mask=expert < E)
    tl.store(cursors_ptr + expert, tl.cumsum(counts, axis=0) - counts, mask=expert < E)
    tl.debug_barrier()  # the cursors are visible to all threads
    place = tl.atomic_add(cursors_ptr + tl.where(mask, ids, 0), 1, mask=mask)
    tl.store(pairs_ptr + place, index, mask=mask)
    if tiles_ptr is not None:
        _write_tiles(tiles_ptr, counts, num_tiles, E, BLOCK_E, BLOCK_M)


@precompile.jit(do_not_specialize=["num_pairs"])
def count(
    ids_ptr,
    counts_ptr,
    num_pairs,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the pairs of each expert to counts. Grid (blocks of pairs)."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + index, mask=index < num_pairs, other=E)
    counts = tl.histogram(tl.minimum(ids, BLOCK_E - 1), BLOCK_E, mask=ids < E)
    expert = tl.arange(0, BLOCK_E)
    tl.atomic_add(counts_ptr + expert, counts, mask=(expert < E) & (counts > 0))


@precompile.jit(do_not_specialize=["num_pairs", "num_tiles"])
def place(
    ids_ptr,
    pairs_ptr,
    counts_ptr,
    cursors_ptr,
    tiles_ptr,
    num_pairs,
    num_tiles,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CURSOR_STRIDE: tl.constexpr,
):
    """Write each pair to its expert's run, in any order within the run. Pairs without an expert are not written.

    `cursors` [E * CURSOR_STRIDE] are zeros, far enough apart that several parts of the L2 cache count.
    One program also writes the table of tiles of BLOCK_M pairs, unless it is None.
    """
    expert = tl.arange(0, BLOCK_E)
    counts = tl.load(counts_ptr + expert, mask=expert < E, other=0)
    starts = tl.cumsum(counts, axis=0) - counts
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + index, mask=index < num_pairs, other=E)
    mask = ids < E
    ids = tl.where(mask, ids, 0)
    rank = tl.atomic_add(cursors_ptr + ids * CURSOR_STRIDE, 1, mask=mask)
    tl.store(pairs_ptr + tl.gather(starts, ids, 0) + rank, index, mask=mask)
    if tiles_ptr is not None:  # noqa: SIM102 (the compiler decides it)
        if tl.program_id(0) == 0:
            _write_tiles(tiles_ptr, counts, num_tiles, E, BLOCK_E, BLOCK_M)


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
def add_pairs(
    scaled_ptr,
    ids_ptr,
    y_ptr,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """y [T, N] = the sum over a token's pairs with an expert, always in the same order. Grid (T, tiles of N)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
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
