"""Attention of absorbed queries to the entries of a paged latent cache, with split entries merged if needed.

The query heads of one or more tokens form the rows of a tile, so that each entry is loaded once for all of them, and
serves as key and as value. Entries that a group of rows shares are loaded once for the heads of several rows, as in cascade
attention (Ye et al., 2024) and Hydragen (Juravsky et al., 2024). Softmax is online (Milakov and Gimelshein, 2018);
partial results of split entries are merged by their log-sum-exps, as in FlashDecoding (Dao et al., 2023). Scores are
in base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenspeed_kernels.triton import precompile


@triton.jit
def find_row(tile, query_start_ptr, num_rows, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the row of a tile, and the tile's index in the row.

    A query token has WIDTH rows of tiles. Row i's tiles begin at query_start[i] * WIDTH // BLOCK_M + i, which leaves
    room for the tiles of all rows before it.
    """
    low = tl.zeros([], dtype=tl.int32)
    high = num_rows
    while high - low > 1:
        middle = (low + high) // 2
        begin = tl.load(query_start_ptr + middle) * WIDTH // BLOCK_M + middle
        if begin <= tile:
            low = middle
        else:
            high = middle
    return low, tile - (tl.load(query_start_ptr + low) * WIDTH // BLOCK_M + low)


@triton.jit
def attend_entries(
    acc,
    highest,
    total,
    q,
    q_rope,
    position,
    start,
    stop,
    cache_ptr,
    table,
    log2_scale,
    cache_stride_b,
    cache_stride_s,
    L: tl.constexpr,
    R: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend to entries [start, stop) of a row's table; with CAUSAL, each query to those up to its position."""
    latent_column, rope_column = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_R)
    for begin in tl.range(start, stop, BLOCK_N):
        key = begin + tl.arange(0, BLOCK_N)
        inside = key < stop
        block = tl.load(table + key // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        entry = cache_ptr + block * cache_stride_b + (key % BLOCK_SIZE) * cache_stride_s
        # Unwritten entries may be NaN, and NaN times a weight of zero is NaN.
        latent = tl.load(
            entry[:, None] + latent_column[None, :],
            mask=inside[:, None] & (latent_column < L)[None, :],
            other=0.0,
        ).to(q.dtype)
        rotated = tl.load(
            entry[:, None] + L + rope_column[None, :],
            mask=inside[:, None] & (rope_column < R)[None, :],
            other=0.0,
        ).to(q.dtype)
        scores = tl.dot(q, tl.trans(latent), input_precision=PRECISION)
        scores = tl.dot(q_rope, tl.trans(rotated), scores, input_precision=PRECISION)
        seen = inside[None, :]
        if CAUSAL:
            seen = seen & (key[None, :] <= position[:, None])
        scores = tl.where(seen, scores * log2_scale, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, axis=1))
        base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        p = tl.exp2(scores - base[:, None])
        keep = tl.exp2(highest - base)
        total = total * keep + tl.sum(p, axis=1)
        acc = acc * keep[:, None]
        acc = tl.dot(p.to(q.dtype), latent, acc, input_precision=PRECISION)
        highest = new_highest
    return acc, highest, total


@triton.jit
def load_queries(
    q_row, used, L: tl.constexpr, R: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr
):
    """Load the queries at pointers [M] in two parts, as entries have them; zeros where not used."""
    latent_column, rope_column = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_R)
    q = tl.load(
        q_row[:, None] + latent_column[None, :],
        mask=used[:, None] & (latent_column < L)[None, :],
        other=0.0,
    )
    q_rope = tl.load(
        q_row[:, None] + L + rope_column[None, :],
        mask=used[:, None] & (rope_column < R)[None, :],
        other=0.0,
    )
    return q, q_rope


_VARYING = ["num_rows", "num_splits", "num_parts", "min_share", "table_stride"]
_INDICES = ["shared_ptr", "query_start_ptr", "seq_lens_ptr", "table_ptr"]


@precompile.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_INDICES)
def attend(
    q_ptr,
    cache_ptr,
    out_ptr,
    lse_ptr,
    shared_ptr,
    query_start_ptr,
    seq_lens_ptr,
    table_ptr,
    num_rows,
    num_splits,
    num_parts,
    min_share,
    log2_scale,
    q_stride_t,
    q_stride_h,
    cache_stride_b,
    cache_stride_s,
    table_stride,
    H: tl.constexpr,
    L: tl.constexpr,
    R: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ONE_QUERY: tl.constexpr,
    CONTEXT: tl.constexpr,
    SHARED: tl.constexpr,
    HAS_LSE: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend to the cache entries of each row. Grid (tiles, splits).

    q is [T, H, L + R], out [T, H, parts, L]; lse is float32 [T, H, parts]. The first parts are those of the splits, with
    an lse of -inf for splits without entries. With ONE_QUERY each row has one query, and its heads form the tiles. With
    CONTEXT queries see only the entries before the step's own. With SHARED, rows that share entries do not see those.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    split = tl.program_id(1)
    if ONE_QUERY:
        TILES: tl.constexpr = (H + BLOCK_M - 1) // BLOCK_M
        row = tl.program_id(0) // TILES
        first = tl.program_id(0) % TILES * BLOCK_M
        start_token = row
        num_queries = 1
    else:
        # Later tiles see more entries. Start with those.
        wanted = tl.num_programs(0) - 1 - tl.program_id(0)
        row, tile = find_row(wanted, query_start_ptr, num_rows, H, BLOCK_M)
        first = tile * BLOCK_M
        start_token = tl.load(query_start_ptr + row)
        num_queries = tl.load(query_start_ptr + row + 1) - start_token
    if first < num_queries * H:
        before = tl.load(seq_lens_ptr + row) - num_queries  # position of the first query
        member = first + tl.arange(0, BLOCK_M)
        query, head = member // H, member % H
        used = query < num_queries
        position = before + query
        stop = before
        if not CONTEXT:
            stop += tl.minimum((first + BLOCK_M - 1) // H, num_queries - 1) + 1
        stop = tl.where(before + num_queries > 0, tl.maximum(stop, 0), 0)
        start = 0
        if SHARED:
            start = tl.load(shared_ptr + 2 + row)
        share = tl.cdiv(tl.cdiv(stop - start, BLOCK_N), num_splits) * BLOCK_N
        share = tl.maximum(share, min_share)
        start += split * share
        stop = tl.minimum(stop, start + share)
        token = (start_token + query).to(tl.int64)
        q_row = q_ptr + token * q_stride_t + head * q_stride_h
        q, q_rope = load_queries(q_row, used, L, R, BLOCK_L, BLOCK_R)
        acc = tl.zeros([BLOCK_M, BLOCK_L], dtype=tl.float32)
        highest = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        total = tl.zeros([BLOCK_M], dtype=tl.float32)
        acc, highest, total = attend_entries(
            acc,
            highest,
            total,
            q,
            q_rope,
            position,
            start,
            stop,
            cache_ptr,
            table_ptr + row.to(tl.int64) * table_stride,
            log2_scale,
            cache_stride_b,
            cache_stride_s,
            L,
            R,
            BLOCK_L,
            BLOCK_R,
            BLOCK_SIZE,
            BLOCK_N,
            not CONTEXT and not ONE_QUERY,
            PRECISION,
        )
        cell = (token * H + head) * num_parts + split
        if HAS_LSE:
            lse = tl.where(total == 0.0, float("-inf"), highest + tl.log2(total))
            tl.store(lse_ptr + cell, lse, mask=used)
        if (start < stop) | (num_parts == 1):
            acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
            latent_column = tl.arange(0, BLOCK_L)
            tl.store(
                out_ptr + cell[:, None] * L + latent_column[None, :],
                acc.to(out_ptr.dtype.element_ty),
                mask=used[:, None] & (latent_column < L)[None, :],
            )


@precompile.jit(
    do_not_specialize=["num_rows", "first_part", "num_parts", "table_stride"],
    do_not_specialize_on_alignment=["seq_lens_ptr", "table_ptr"],
)
def attend_shared(
    q_ptr,
    cache_ptr,
    out_ptr,
    lse_ptr,
    shared_ptr,
    seq_lens_ptr,
    table_ptr,
    num_rows,
    first_part,
    num_parts,
    log2_scale,
    q_stride_t,
    q_stride_h,
    cache_stride_b,
    cache_stride_s,
    table_stride,
    H: tl.constexpr,
    L: tl.constexpr,
    R: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend to the entries that a group of rows shares. Grid (splits, tiles of heads, from several rows).

    Split i writes part first_part + i of `out` and `lse`, see `attend`. Returns at once if nothing is shared.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    shared = tl.load(shared_ptr)
    if shared > 0:
        split = tl.program_id(0)
        member = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
        row, head = member // H, member % H
        inside = row < num_rows
        used = inside & (tl.load(shared_ptr + 2 + row, mask=inside, other=0) > 0)
        share = tl.cdiv(tl.cdiv(shared, BLOCK_N), tl.num_programs(0)) * BLOCK_N
        start = split * share
        stop = tl.minimum(shared, start + share)
        is_needed = tl.max(used.to(tl.int32), axis=0) > 0  # skip tiles of other rows
        stop = tl.where(is_needed, stop, start)
        q_row = q_ptr + row.to(tl.int64) * q_stride_t + head * q_stride_h
        q, q_rope = load_queries(q_row, used, L, R, BLOCK_L, BLOCK_R)
        acc = tl.zeros([BLOCK_M, BLOCK_L], dtype=tl.float32)
        highest = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        total = tl.zeros([BLOCK_M], dtype=tl.float32)
        acc, highest, total = attend_entries(
            acc,
            highest,
            total,
            q,
            q_rope,
            row,
            start,
            stop,
            cache_ptr,
            table_ptr + tl.load(shared_ptr + 1).to(tl.int64) * table_stride,
            log2_scale,
            cache_stride_b,
            cache_stride_s,
            L,
            R,
            BLOCK_L,
            BLOCK_R,
            BLOCK_SIZE,
            BLOCK_N,
            False,
            PRECISION,
        )
        cell = member.to(tl.int64) * num_parts + first_part + split
        is_part = used & (start < stop)
        lse = tl.where(is_part, highest + tl.log2(total), float("-inf"))
        tl.store(lse_ptr + cell, lse, mask=inside)
        if start < stop:
            latent_column = tl.arange(0, BLOCK_L)
            tl.store(
                out_ptr + cell[:, None] * L + latent_column[None, :],
                acc / total[:, None],
                mask=used[:, None] & (latent_column < L)[None, :],
            )


@precompile.jit(
    do_not_specialize=["num_splits", "num_shared_splits"],
    do_not_specialize_on_alignment=["shared_ptr"],
)
def merge(
    part_ptr,
    part_lse_ptr,
    out_ptr,
    lse_ptr,
    shared_ptr,
    num_splits,
    num_shared_splits,
    L: tl.constexpr,
    BLOCK_L: tl.constexpr,
    SPLITS: tl.constexpr,
    PARTS: tl.constexpr,
    SHARED: tl.constexpr,
    HAS_LSE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merge part [T, H, parts, L] into out [T, H, L], PARTS at a time; zeros without any entry. Grid (T * H).

    The parts are those of the splits, then with SHARED those of the shared splits, which are unwritten if nothing is
    shared. Of both, parts with entries come first.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    cell = tl.program_id(0).to(tl.int64)
    split, column = tl.arange(0, SPLITS), tl.arange(0, BLOCK_L)
    nothing = float("-inf")
    first_cell = cell * (num_splits + num_shared_splits)
    all_lse = tl.load(part_lse_ptr + first_cell + split, mask=split < num_splits, other=nothing)
    highest = tl.max(all_lse, axis=0)
    num_own = tl.sum((all_lse != nothing).to(tl.int32), axis=0)
    count = num_own
    if SHARED:
        num_written = tl.where(tl.load(shared_ptr) > 0, num_shared_splits, 0)
        shared_lse = tl.load(
            part_lse_ptr + first_cell + num_splits + split,
            mask=split < num_written,
            other=nothing,
        )
        highest = tl.maximum(highest, tl.max(shared_lse, axis=0))
        count += tl.sum((shared_lse != nothing).to(tl.int32), axis=0)
    base = tl.where(highest == nothing, 0.0, highest)
    total = tl.sum(tl.exp2(all_lse - base), axis=0)
    if SHARED:
        total += tl.sum(tl.exp2(shared_lse - base), axis=0)
    acc = tl.zeros([BLOCK_L], dtype=tl.float32)
    for first in range(0, count, PARTS):
        index = first + tl.arange(0, PARTS)
        part = first_cell + index
        if SHARED:
            part = tl.where(index < num_own, part, part - num_own + num_splits)
        lse = tl.load(part_lse_ptr + part, mask=index < count, other=nothing)
        values = tl.load(
            part_ptr + part[:, None] * L + column[None, :],
            mask=(index < count)[:, None] & (column < L)[None, :],
            other=0.0,
        )
        acc += tl.sum(tl.exp2(lse - base)[:, None] * values, axis=0)
    acc = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + cell * L + column, acc.to(out_ptr.dtype.element_ty), mask=column < L)
    if HAS_LSE:
        tl.store(lse_ptr + cell, tl.where(total == 0.0, nothing, base + tl.log2(total)))
