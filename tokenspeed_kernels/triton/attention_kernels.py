"""Triton code of paged attention: tiles of query tokens against blocks of keys, split and merged if needed.

The query heads that share a key head stand together in the rows of a tile, so each key is read once for all
of them. Softmax is online (Milakov and Gimelshein, 2018); splits of the keys are merged by their
log-sum-exps, as in FlashDecoding (Dao et al., 2023). Scores are in base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _attend_keys(
    acc, highest, total, q, position, start, stop, k_base, v_base, table,
    stride_b, stride_s, window, log2_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):
    """Attend to keys [start, stop), masking by position only if MASKED; position [BLOCK_M]."""
    column = tl.arange(0, BLOCK_D)
    for first in tl.range(start, stop, BLOCK_N):
        key = first + tl.arange(0, BLOCK_N)
        if MASKED:
            inside = key < stop
            block = tl.load(table + key // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
            mask = inside[:, None] & (column < D)[None, :]
        else:
            block = tl.load(table + key // BLOCK_SIZE).to(tl.int64)
            mask = (column < D)[None, :] & (key >= 0)[:, None]
        offset = block * stride_b + (key % BLOCK_SIZE) * stride_s
        k_ptrs = k_base + offset
        v_ptrs = v_base + offset
        if MASKED or D < BLOCK_D:
            k = tl.load(k_ptrs[:, None] + column[None, :], mask=mask, other=0.0)
        else:
            k = tl.load(k_ptrs[:, None] + column[None, :])
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION)
        if MASKED:
            seen = (key[None, :] <= position[:, None]) & inside[None, :]
            if HAS_WINDOW:
                seen = seen & (key[None, :] > position[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, axis=1) * log2_scale)
        if MASKED:
            base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        else:
            base = new_highest
        p = tl.exp2(scores * log2_scale - base[:, None])
        keep = tl.exp2(highest - base)
        total = total * keep + tl.sum(p, axis=1)
        if MASKED or D < BLOCK_D:
            v = tl.load(v_ptrs[:, None] + column[None, :], mask=mask, other=0.0)
        else:
            v = tl.load(v_ptrs[:, None] + column[None, :])
        acc = acc * keep[:, None]
        acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc, input_precision=PRECISION)
        highest = new_highest
    return acc, highest, total


@triton.jit
def _first_key(first_query, window, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """Return the first key, rounded down, that a query position sees."""
    if HAS_WINDOW:
        return tl.maximum(first_query - window + 1, 0) // BLOCK_N * BLOCK_N
    return tl.zeros([], dtype=tl.int32)


@triton.jit
def _share(num_keys, num_splits, least, BLOCK_N: tl.constexpr):
    """Return the keys that one split takes: whole steps, and no fewer than `least`."""
    return tl.maximum(tl.cdiv(tl.cdiv(num_keys, BLOCK_N), num_splits) * BLOCK_N, least)


_VARYING = ["num_rows", "first_row", "num_splits", "least", "window"]
_INDICES = ["query_start_ptr", "seq_lens_ptr", "table_ptr"]


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_INDICES)
def attend(
    q_ptr, k_ptr, v_ptr, out_ptr, partial_ptr, lse_ptr, query_start_ptr, seq_lens_ptr, table_ptr,
    first_row, num_rows, num_splits, least, window, log2_scale, q_stride_t, q_stride_h, out_stride_t, out_stride_h,
    stride_b, stride_s, stride_h, table_stride,
    G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, ONE_TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):
    """Grid (tiles, key heads, splits). With ONE_TILE a row is a tile; else a tile finds its row.

    Row i's tiles start at query_start[i] // TOKENS + i, counted from `first_row`; the few surplus tiles
    leave at once. k and v have the same strides. With splits, a row is cut into up to `num_splits` of no
    fewer than `least` keys; results go to `partial` and `lse`, a program's own slice of each, unless the
    row is one piece.
    """
    TOKENS: tl.constexpr = BLOCK_M // G
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    if ONE_TILE:
        row = first_row + tl.program_id(0)
        tile = 0
    else:
        wanted = tl.num_programs(0) - 1 - tl.program_id(0)  # later tiles see more keys: heavy ones first
        origin = tl.load(query_start_ptr + first_row)
        low = 0
        high = num_rows
        while high - low > 1:
            middle = (low + high) // 2
            begin = tl.load(query_start_ptr + first_row + middle) - origin
            if begin // TOKENS + middle <= wanted:
                low = middle
            else:
                high = middle
        row = first_row + low
        tile = wanted - ((tl.load(query_start_ptr + row) - origin) // TOKENS + low)
    start_token = tl.load(query_start_ptr + row)
    num_queries = tl.load(query_start_ptr + row + 1) - start_token
    seq_len = tl.load(seq_lens_ptr + row)
    first_query = tile * TOKENS
    if first_query < num_queries:
        member = tl.arange(0, BLOCK_M)
        query = first_query + member // G
        head = kv_head * G + member % G
        used = (member < TOKENS * G) & (query < num_queries)
        position = seq_len - num_queries + query
        column = tl.arange(0, BLOCK_D)
        q_mask = used[:, None] & (column < D)[None, :]
        token = (start_token + query).to(tl.int64)
        q_ptrs = q_ptr + token * q_stride_t + head * q_stride_h
        q = tl.load(q_ptrs[:, None] + column[None, :], mask=q_mask, other=0.0)
        if k_ptr.dtype.element_ty == tl.float8e4nv:  # float16 holds e4m3 exactly, one instruction for two
            q = tl.minimum(tl.maximum(q.to(tl.float32), -65504.0), 65504.0).to(tl.float16)

        stop = seq_len - num_queries + tl.minimum(first_query + TOKENS, num_queries)
        start = _first_key(seq_len - num_queries + first_query, window, BLOCK_N, HAS_WINDOW)
        is_whole = True
        if SPLIT:
            share = _share(stop - start, num_splits, least, BLOCK_N)
            is_whole = stop - start <= share
            start += split * share
            stop = tl.minimum(stop, start + share)
        unmasked = start
        if not HAS_WINDOW:
            whole = tl.minimum(stop, seq_len - num_queries + first_query + 1) - start
            unmasked = start + tl.maximum(whole, 0) // BLOCK_N * BLOCK_N

        acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
        highest = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        total = tl.zeros([BLOCK_M], dtype=tl.float32)
        k_base = k_ptr + kv_head * stride_h
        v_base = v_ptr + kv_head * stride_h
        table = table_ptr + row.to(tl.int64) * table_stride
        if not HAS_WINDOW:
            acc, highest, total = _attend_keys(
                acc, highest, total, q, position, start, unmasked, k_base, v_base, table,
                stride_b, stride_s, window, log2_scale,
                D, BLOCK_D, BLOCK_SIZE, BLOCK_N, False, False, PRECISION,
            )
        acc, highest, total = _attend_keys(
            acc, highest, total, q, position, unmasked, stop, k_base, v_base, table,
            stride_b, stride_s, window, log2_scale,
            D, BLOCK_D, BLOCK_SIZE, BLOCK_N, True, HAS_WINDOW, PRECISION,
        )
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        if is_whole:
            if split == 0:
                out_ptrs = out_ptr + token * out_stride_t + head * out_stride_h
                tl.store(out_ptrs[:, None] + column[None, :], acc.to(out_ptr.dtype.element_ty), mask=q_mask)
        elif SPLIT:
            program = (tl.program_id(0) * tl.num_programs(1) + kv_head) * num_splits + split
            slot = program.to(tl.int64) * BLOCK_M + member
            tl.store(partial_ptr + slot[:, None] * BLOCK_D + column[None, :], acc, mask=q_mask)
            lse = tl.where(total == 0.0, float("-inf"), highest + tl.log2(total))
            tl.store(lse_ptr + slot, lse, mask=used)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_INDICES)
def merge(
    partial_ptr, lse_ptr, out_ptr, query_start_ptr, seq_lens_ptr, first_row, num_splits, least, window,
    out_stride_t, out_stride_h,
    G: tl.constexpr, K: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
):
    """Grid (rows, query heads * query tokens, BLOCK_D / COLUMNS): merge the splits of one query head, if any."""
    row = tl.program_id(0)
    query = tl.program_id(1) // (G * K)
    head = tl.program_id(1) % (G * K)
    kv_head = head // G
    start_token = tl.load(query_start_ptr + first_row + row)
    num_queries = tl.load(query_start_ptr + first_row + row + 1) - start_token
    seq_len = tl.load(seq_lens_ptr + first_row + row)
    num_keys = seq_len - _first_key(seq_len - num_queries, window, BLOCK_N, HAS_WINDOW)
    if (query < num_queries) & (num_keys > _share(num_keys, num_splits, least, BLOCK_N)):
        split = tl.arange(0, BLOCK_SPLITS)
        program = ((row * K + kv_head) * num_splits + split).to(tl.int64)
        slot = program * BLOCK_M + query * G + head % G
        lse = tl.load(lse_ptr + slot, mask=split < num_splits, other=float("-inf"))
        highest = tl.max(lse, axis=0)
        weight = tl.exp2(lse - tl.where(highest == float("-inf"), 0.0, highest))
        weight = weight / tl.maximum(tl.sum(weight, axis=0), 1e-30)
        column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        mask = (split < num_splits)[:, None] & (column < D)[None, :]
        partial = tl.load(partial_ptr + slot[:, None] * BLOCK_D + column[None, :], mask=mask, other=0.0)
        out = tl.sum(partial * weight[:, None], axis=0).to(out_ptr.dtype.element_ty)
        token = (start_token + query).to(tl.int64)
        tl.store(out_ptr + token * out_stride_t + head * out_stride_h + column, out, mask=column < D)
