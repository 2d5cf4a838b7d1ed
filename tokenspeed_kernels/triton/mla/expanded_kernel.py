"""Attention to entries of a latent cache that were gathered and expanded to keys and values for each head.

Gathered entries are [K, L + R], and expanded ones [K, H, N + V]: a head's key without its rotated part, then its value.
The rotated part of a key is in the entry. Softmax is online (Milakov and Gimelshein, 2018); scores are in base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernels.triton import precompile
from tokenspeed_kernels.triton.mla.absorbed_kernel import find_row

_INDICES = ["query_start_ptr", "context_start_ptr", "seq_lens_ptr", "table_ptr"]


@precompile.jit(
    do_not_specialize=["num_rows", "first", "table_stride"], do_not_specialize_on_alignment=_INDICES
)
def gather(
    cache_ptr,
    entries_ptr,
    query_start_ptr,
    context_start_ptr,
    seq_lens_ptr,
    table_ptr,
    num_rows,
    first,
    cache_stride_b,
    cache_stride_s,
    table_stride,
    WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CONTEXT: tl.constexpr,
):
    """Copy the entries of the step's own tokens, or of the tokens before them (CONTEXT), from index `first` on.

    Zeros for tokens of no row. Grid (entries).
    """
    index = first + tl.program_id(0)
    start_ptr = context_start_ptr if CONTEXT else query_start_ptr
    row = tl.zeros([], dtype=tl.int32)  # the last one that starts at or before the index
    high = num_rows
    while high - row > 1:
        middle = (row + high) // 2
        if tl.load(start_ptr + middle) <= index:
            row = middle
        else:
            high = middle
    column = tl.arange(0, BLOCK_W)
    position = index - tl.load(start_ptr + row)
    seq_len = tl.load(seq_lens_ptr + row)
    if not CONTEXT:
        position += seq_len - tl.load(query_start_ptr + row + 1) + tl.load(query_start_ptr + row)
    inside = (index < tl.load(start_ptr + row + 1)) & (position >= 0) & (position < seq_len)
    block = tl.load(
        table_ptr + row.to(tl.int64) * table_stride + position // BLOCK_SIZE, mask=inside, other=0
    ).to(tl.int64)
    entry = cache_ptr + block * cache_stride_b + position % BLOCK_SIZE * cache_stride_s
    value = tl.load(entry + column, mask=column < tl.where(inside, WIDTH, 0), other=0.0)
    to = entries_ptr + tl.program_id(0).to(tl.int64) * WIDTH
    tl.store(to + column, value.to(entries_ptr.dtype.element_ty), mask=column < WIDTH)


@triton.jit
def _attend_keys(
    acc,
    highest,
    total,
    q,
    q_rope,
    start,
    stop,
    last_key,
    keys_ptr,
    entries_ptr,
    keys_stride,
    log2_scale,
    N: tl.constexpr,
    R: tl.constexpr,
    V: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend to keys [start, stop), with MASKED only up to `last_key` [BLOCK_M] of each query."""
    column, rope_column = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_R)
    value_column = tl.arange(0, BLOCK_V)
    for begin in tl.range(start, stop, BLOCK_N):
        key = begin + tl.arange(0, BLOCK_N)
        inside = (key < stop)[:, None]
        k_row = keys_ptr + key.to(tl.int64)[:, None] * keys_stride
        r_row = entries_ptr + key.to(tl.int64)[:, None] * WIDTH + (WIDTH - R)
        if MASKED or N < BLOCK_D:
            k = tl.load(k_row + column[None, :], mask=inside & (column < N)[None, :], other=0.0)
        else:
            k = tl.load(k_row + column[None, :])
        if MASKED or R < BLOCK_R:
            rotated = tl.load(
                r_row + rope_column[None, :], mask=inside & (rope_column < R)[None, :], other=0.0
            )
        else:
            rotated = tl.load(r_row + rope_column[None, :])
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        scores = tl.dot(q_rope, tl.trans(rotated), scores, input_precision=PRECISION)
        if MASKED:
            seen = (key < stop)[None, :] & (key[None, :] <= last_key[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, axis=1) * log2_scale)
        base = tl.where(new_highest == float("-inf"), 0.0, new_highest) if MASKED else new_highest
        p = tl.exp2(scores * log2_scale - base[:, None])
        keep = tl.exp2(highest - base)
        total = total * keep + tl.sum(p, axis=1)
        if MASKED or V < BLOCK_V:
            v = tl.load(
                k_row + N + value_column[None, :],
                mask=inside & (value_column < V)[None, :],
                other=0.0,
            )
        else:
            v = tl.load(k_row + N + value_column[None, :])
        acc = acc * keep[:, None]
        acc = tl.dot(p.to(q.dtype), v, acc, input_precision=PRECISION)
        highest = new_highest
    return acc, highest, total


_VARYING = ["num_rows", "window_start", "window_stop"]


@precompile.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_INDICES)
def attend(
    q_ptr,
    keys_ptr,
    entries_ptr,
    out_ptr,
    lse_ptr,
    query_start_ptr,
    context_start_ptr,
    seq_lens_ptr,
    num_rows,
    window_start,
    window_stop,
    log2_scale,
    q_stride_t,
    q_stride_h,
    out_stride_t,
    out_stride_h,
    keys_stride,
    H: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    V: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CONTEXT: tl.constexpr,
    HAS_LSE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend to the step's own tokens and write out [T, H, V] and lse float32 [T, H] (HAS_LSE).

    With CONTEXT, attend to the expanded entries [window_start, window_stop) of the tokens before the step's own, and
    merge the result into out and lse. Grid (tiles, H).
    """
    # Later tiles see more keys. Start with those.
    wanted = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    row, tile = find_row(wanted, query_start_ptr, num_rows, 1, BLOCK_M)
    start_token = tl.load(query_start_ptr + row)
    num_queries = tl.load(query_start_ptr + row + 1) - start_token
    first_query = tile * BLOCK_M
    query = first_query + tl.arange(0, BLOCK_M)
    used = query < num_queries
    if CONTEXT:
        start = tl.maximum(tl.load(context_start_ptr + row), window_start) - window_start
        stop = tl.minimum(tl.load(context_start_ptr + row + 1), window_stop) - window_start
        unmasked = start + tl.maximum(stop - start, 0) // BLOCK_N * BLOCK_N
        last_key = tl.zeros([BLOCK_M], dtype=tl.int32) + stop
    else:
        start = start_token
        stop = start_token + tl.minimum(first_query + BLOCK_M, num_queries)
        unmasked = start + (first_query + 1) // BLOCK_N * BLOCK_N
        last_key = start_token + query
    exists = (first_query < num_queries) & (tl.load(seq_lens_ptr + row) > 0)
    if exists & (start < stop):
        column, rope_column = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_R)
        value_column = tl.arange(0, BLOCK_V)
        token = (start_token + query).to(tl.int64)
        q_row = (q_ptr + token * q_stride_t + head * q_stride_h)[:, None]
        q = tl.load(q_row + column[None, :], mask=used[:, None] & (column < N)[None, :], other=0.0)
        q_rope = tl.load(
            q_row + N + rope_column[None, :],
            mask=used[:, None] & (rope_column < R)[None, :],
            other=0.0,
        )
        acc = tl.zeros([BLOCK_M, BLOCK_V], dtype=tl.float32)
        highest = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        total = tl.zeros([BLOCK_M], dtype=tl.float32)
        keys_ptr += head * (N + V)
        acc, highest, total = _attend_keys(
            acc,
            highest,
            total,
            q,
            q_rope,
            start,
            unmasked,
            last_key,
            keys_ptr,
            entries_ptr,
            keys_stride,
            log2_scale,
            N,
            R,
            V,
            WIDTH,
            BLOCK_D,
            BLOCK_R,
            BLOCK_V,
            BLOCK_N,
            False,
            PRECISION,
        )
        acc, highest, total = _attend_keys(
            acc,
            highest,
            total,
            q,
            q_rope,
            unmasked,
            stop,
            last_key,
            keys_ptr,
            entries_ptr,
            keys_stride,
            log2_scale,
            N,
            R,
            V,
            WIDTH,
            BLOCK_D,
            BLOCK_R,
            BLOCK_V,
            BLOCK_N,
            True,
            PRECISION,
        )
        acc = acc / total[:, None]
        lse = highest + tl.log2(total)
        out = (out_ptr + token * out_stride_t + head * out_stride_h)[:, None] + value_column[
            None, :
        ]
        stored = used[:, None] & (value_column < V)[None, :]
        if CONTEXT:
            before = tl.load(lse_ptr + token * H + head, mask=used, other=0.0)
            weight = 1.0 / (1.0 + tl.exp2(before - lse))
            earlier = tl.load(out, mask=stored, other=0.0).to(tl.float32)
            acc = earlier + (acc - earlier) * weight[:, None]
            top = tl.maximum(before, lse)
            lse = top + tl.log2(tl.exp2(before - top) + tl.exp2(lse - top))
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=stored)
        if HAS_LSE:
            tl.store(lse_ptr + token * H + head, lse, mask=used)
