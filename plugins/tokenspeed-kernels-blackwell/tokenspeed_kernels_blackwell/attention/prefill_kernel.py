# mypy: allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators, allow-untyped-defs, no-warn-return-any
"""The prefill attention kernel for the tensor cores of compute capability 10.0.

Whole blocks of keys and values are loaded with TMA. Both GEMMs are `tcgen05` instructions that accumulate in tensor
memory, so a tile of 128 rows needs no registers for its sums. The query heads that share a KV head form the rows of
one tile. Softmax is online (Milakov and Gimelshein, 2018); scores are in base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tile_of(query_start_ptr, num_rows, wanted, TOKENS: tl.constexpr):
    """Return a tile's row and its index in the row. The tiles of row i start at query_start[i] // TOKENS + i."""
    origin = tl.load(query_start_ptr)
    row = tl.zeros([], dtype=tl.int32)
    above = num_rows
    while above - row > 1:
        middle = (row + above) // 2
        begin = (tl.load(query_start_ptr + middle) - origin) // TOKENS + middle
        row = tl.where(begin <= wanted, middle, row)
        above = tl.where(begin <= wanted, above, middle)
    return row, wanted - ((tl.load(query_start_ptr + row) - origin) // TOKENS + row)


@triton.jit
def _attend_blocks(
    acc,
    highest,
    total,
    q,
    position,
    start,
    stop,
    k_desc,
    v_desc,
    table,
    kv_head,
    window,
    log2_scale,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Attend to keys [start, stop); `start` is the first key of a block. With MASKED, hidden keys may be NaN."""
    for first in tl.range(start, stop, BLOCK_SIZE):
        block = tl.load(table + first // BLOCK_SIZE)
        k = k_desc.load([block, kv_head, 0, 0]).reshape(BLOCK_SIZE, D)
        scores = tl.dot(q, k.T)
        key = first + tl.arange(0, BLOCK_SIZE)
        if MASKED:
            seen = (key[None, :] <= position[:, None]) & (key < stop)[None, :]
            if HAS_WINDOW:
                seen = seen & (key[None, :] > position[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, axis=1) * log2_scale)
        base = new_highest
        if MASKED:
            base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        p = tl.exp2(scores * log2_scale - base[:, None])
        keep = tl.exp2(highest - base)
        total = total * keep + tl.sum(p, axis=1)
        v = v_desc.load([block, kv_head, 0, 0]).reshape(BLOCK_SIZE, D)
        if MASKED:
            # Unwritten values may be NaN, and NaN times a weight of zero is NaN.
            v = tl.where((key < stop)[:, None], v, 0.0)
        acc = tl.dot(p.to(q.dtype), v, acc * keep[:, None])
        highest = new_highest
    return acc, highest, total


_INDICES = ["query_start_ptr", "seq_lens_ptr"]


@triton.jit(do_not_specialize=["num_rows", "window"], do_not_specialize_on_alignment=_INDICES)
def attend(
    q_ptr,
    k_desc,
    v_desc,
    out_ptr,
    query_start_ptr,
    seq_lens_ptr,
    table_ptr,
    num_rows,
    window,
    log2_scale,
    q_stride_t,
    q_stride_h,
    out_stride_t,
    out_stride_h,
    table_stride,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Attend to the paged keys of each row's queries. Grid (tiles, KV heads).

    Surplus tiles return at once. Keys and values are descriptors of [B, K, block_size, D].
    """
    TOKENS: tl.constexpr = BLOCK_M // G
    kv_head = tl.program_id(1)
    # Later tiles see more keys. Start with those.
    wanted = tl.num_programs(0) - 1 - tl.program_id(0)
    row, tile = _tile_of(query_start_ptr, num_rows, wanted, TOKENS)
    start_token = tl.load(query_start_ptr + row)
    num_queries = tl.load(query_start_ptr + row + 1) - start_token
    first_query = tile * TOKENS
    if first_query < num_queries:
        first_position = tl.load(seq_lens_ptr + row) - num_queries + first_query
        member = tl.arange(0, BLOCK_M)
        query = first_query + member // G
        used = (member < TOKENS * G) & (query < num_queries)
        position = first_position + member // G
        column = tl.arange(0, D)
        token = (start_token + query).to(tl.int64)
        head = kv_head * G + member % G
        q_ptrs = (q_ptr + token * q_stride_t + head * q_stride_h)[:, None] + column[None, :]
        q = tl.load(q_ptrs, mask=used[:, None], other=0.0)
        stop = first_position + tl.minimum(TOKENS, num_queries - first_query)
        start = tl.zeros([], dtype=tl.int32)
        if HAS_WINDOW:
            start = tl.maximum(first_position - window + 1, 0) // BLOCK_SIZE * BLOCK_SIZE
        acc = tl.zeros([BLOCK_M, D], dtype=tl.float32)
        highest = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        total = tl.zeros([BLOCK_M], dtype=tl.float32)
        table = table_ptr + row.to(tl.int64) * table_stride
        if not HAS_WINDOW:
            whole = tl.maximum(first_position + 1, 0) // BLOCK_SIZE * BLOCK_SIZE
            acc, highest, total = _attend_blocks(
                acc,
                highest,
                total,
                q,
                position,
                start,
                whole,
                k_desc,
                v_desc,
                table,
                kv_head,
                window,
                log2_scale,
                D,
                BLOCK_SIZE,
                False,
                False,
            )
            start = whole
        acc, highest, total = _attend_blocks(
            acc,
            highest,
            total,
            q,
            position,
            start,
            stop,
            k_desc,
            v_desc,
            table,
            kv_head,
            window,
            log2_scale,
            D,
            BLOCK_SIZE,
            True,
            HAS_WINDOW,
        )
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        out_ptrs = (out_ptr + token * out_stride_t + head * out_stride_h)[:, None] + column[None, :]
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=used[:, None])
