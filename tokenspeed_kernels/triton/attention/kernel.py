"""The paged attention kernel: tiles of queries against blocks of keys, with split keys merged if needed.

Layout: q [T, H, D], out [T, H, V], k_cache [B, block_size, K, D], v_cache [B, block_size, K, V], block table [S, M].
The query heads that share a KV head form the rows of one tile, so each key is loaded once for all of them. The program
that finishes last merges the partial results of split keys.

Sources: PagedAttention (Kwon et al., 2023), FlashAttention-2 (Dao, 2023) and FlashDecoding (Dao et al., 2023).
"""

from __future__ import annotations

import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenspeed_kernels.triton import precompile
from tokenspeed_kernels.triton.attention.keys import (
    BASE2,
    attend_keys,
    first_key,
    fit_keys,
    keys_per_split,
)
from tokenspeed_kernels.triton.attention.merge import merge, merge_group

_VARYING = ["num_rows", "num_splits", "num_shared_splits", "min_split", "window"]
_INDICES = ["query_start_ptr", "seq_lens_ptr", "table_ptr", "num_row_tiles"]


@precompile.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_INDICES)
def attend(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    arrived_ptr,
    shared_partial_ptr,
    shared_lse_ptr,
    found_ptr,
    parts_ptr,
    sinks_ptr,
    query_start_ptr,
    seq_lens_ptr,
    table_ptr,
    num_rows,
    num_row_tiles,
    num_splits,
    num_shared_splits,
    min_split,
    window,
    log2_scale,
    q_stride_t,
    q_stride_h,
    out_stride_t,
    out_stride_h,
    stride_b,
    stride_s,
    stride_h,
    v_stride_s,
    v_stride_h,
    table_stride,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLIT: tl.constexpr,
    IS_DECODE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_CHUNKED: tl.constexpr,
    IS_BIDIRECTIONAL: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
    SHARED: tl.constexpr,
    SHARED_BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
    MEMBERS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Attend to the paged keys of each row. Grid (tiles, KV heads, splits).

    A tile holds TOKENS <= BLOCK_M // G query tokens, each with the G query heads of a KV head. Heads have D elements in
    keys and V in values; BLOCK_D and BLOCK_V are the next powers of two.

    IS_DECODE: each row has `num_row_tiles` tiles, of which those without queries return at once. Otherwise a tile
    searches for its row: the tiles of row i start at query_start[i] // TOKENS + i, and the few surplus tiles return at
    once. The caches have the same stride between blocks.

    SPLIT (requires IS_DECODE): a tile's keys are split into up to `num_splits` parts of at least `min_split` keys. If
    there are several parts, each program writes its result to its own slice of `partial` and `lse` and counts itself
    in `arrived`, which is zero before and after. Groups of PARTS programs are merged first: the last program of a group
    merges the group, and the last group's program merges the groups. Each pass merges MEMBERS of a tile's query rows.

    SHARED (requires SPLIT): the first `found[2 + row]` keys are skipped. Their results are in `shared_partial` once the
    previous launch (`attend_shared`) has finished. The other keys are divided as `parts` says (see `divide_keys`). Grid
    (parts, KV heads, 1).

    `sinks` (float32 [H], or None) are scores that join each head's softmax, in its first split.

    IS_BIDIRECTIONAL: queries of a row that starts at position 0 see later keys too, those less than `window` away.

    PDL: this kernel may start before the previous one has finished (see `pdl`). With SHARED the previous kernel is
    `attend_shared`. That kernel has already waited for all inputs of this one and does not access its outputs, so the
    wait comes last, or just before its results are merged.
    """
    if PDL:
        if not SHARED:
            gdc_wait()
        gdc_launch_dependents()
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    if SHARED:
        part_ptr = parts_ptr + 4 * tl.program_id(0)
        row = tl.load(part_ptr)
        is_unused = row < 0
        row = tl.maximum(row, 0)
        split = tl.load(part_ptr + 1) // 65536
        tile = 0
    elif IS_DECODE:
        row = tl.program_id(0) // num_row_tiles
        tile = tl.program_id(0) % num_row_tiles
    else:
        # Later tiles see more keys. Start with those.
        wanted = tl.num_programs(0) - 1 - tl.program_id(0)
        num_tokens = tl.load(query_start_ptr + num_rows)
        row = tl.minimum(tl.maximum(wanted - num_tokens // TOKENS, 0), num_rows - 1)
        is_padding = tl.load(query_start_ptr + row) == num_tokens  # rows without queries come last
        high = tl.where(is_padding, row + 1, tl.minimum(num_rows, wanted + 1))
        while high - row > 1:
            middle = (row + high) // 2
            if tl.load(query_start_ptr + middle) // TOKENS + middle <= wanted:
                row = middle
            else:
                high = middle
        tile = wanted - (tl.load(query_start_ptr + row) // TOKENS + row)
    start_token = tl.load(query_start_ptr + row)
    num_queries = tl.load(query_start_ptr + row + 1) - start_token
    if SHARED:
        num_queries = tl.where(is_unused, 0, num_queries)
    seq_len = tl.load(seq_lens_ptr + row)
    first_query = tile * TOKENS
    stop = seq_len - num_queries + tl.minimum(first_query + TOKENS, num_queries)
    num_later = 0  # number of keys after its own position that a query sees
    if IS_BIDIRECTIONAL:
        if HAS_WINDOW:
            num_later = tl.where(seq_len == num_queries, window - 1, 0)
        else:
            num_later = tl.where(seq_len == num_queries, seq_len, 0)
        stop = tl.minimum(stop + num_later, seq_len)
    start = first_key(seq_len - num_queries + first_query, window, BLOCK_N, HAS_WINDOW, IS_CHUNKED)
    is_whole = True
    shared = 0
    if SHARED:
        shared = tl.load(found_ptr + 2 + row)
        num_parts = tl.load(part_ptr + 1) % 65536
        is_whole = (num_parts <= 1) & (shared == 0)
        start = tl.load(part_ptr + 2)
        stop = tl.load(part_ptr + 3)
    elif SPLIT:
        share = keys_per_split(stop - start, num_splits, min_split, BLOCK_N)
        num_parts = tl.cdiv(stop - start, share)
        is_whole = num_parts <= 1
        start += split * share
        stop = tl.minimum(stop, start + share)
    if (first_query < num_queries) & ((split == 0) | (start < stop)):
        member = tl.arange(0, BLOCK_M)
        query = first_query + member // G
        head = kv_head * G + member % G
        used = (member < TOKENS * G) & (query < num_queries)
        position = seq_len - num_queries + query
        last_seen = position + num_later
        column = tl.arange(0, BLOCK_D)
        v_column = tl.arange(0, BLOCK_V)
        q_mask = used[:, None] & (column < D)[None, :]
        token = (start_token + query).to(tl.int64)
        q_ptrs = q_ptr + token * q_stride_t + head * q_stride_h
        q = tl.load(q_ptrs[:, None] + column[None, :], mask=q_mask, other=0.0)
        q = fit_keys(q, k_ptr.dtype.element_ty)

        unmasked = start
        if not HAS_WINDOW:
            if SHARED:
                whole = stop - start  # without waiting for the length
            else:
                whole = (
                    tl.minimum(stop, seq_len - num_queries + first_query + 1 + num_later) - start
                )
            unmasked = start + tl.maximum(whole, 0) // BLOCK_N * BLOCK_N

        acc = tl.zeros([BLOCK_M, BLOCK_V], dtype=tl.float32)
        highest = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        total = tl.zeros([BLOCK_M], dtype=tl.float32)
        if sinks_ptr is not None:
            sink = tl.load(sinks_ptr + head) * BASE2
            highest = tl.where(split == 0, sink, highest)
            total = tl.where(split == 0, 1.0, total)
        k_base = k_ptr + kv_head * stride_h
        v_base = v_ptr + kv_head * (stride_h if V == D else v_stride_h)
        table = table_ptr + row.to(tl.int64) * table_stride
        if not HAS_WINDOW:
            acc, highest, total = attend_keys(
                acc,
                highest,
                total,
                q,
                position,
                last_seen,
                start,
                unmasked,
                k_base,
                v_base,
                table,
                stride_b,
                stride_s,
                v_stride_s,
                window,
                log2_scale,
                D,
                BLOCK_D,
                V,
                BLOCK_V,
                BLOCK_SIZE,
                BLOCK_N,
                False,
                False,
                False,
                SOFT_CAP,
                PRECISION,
            )
        acc, highest, total = attend_keys(
            acc,
            highest,
            total,
            q,
            position,
            last_seen,
            unmasked,
            stop,
            k_base,
            v_base,
            table,
            stride_b,
            stride_s,
            v_stride_s,
            window,
            log2_scale,
            D,
            BLOCK_D,
            V,
            BLOCK_V,
            BLOCK_SIZE,
            BLOCK_N,
            True,
            HAS_WINDOW,
            IS_CHUNKED,
            SOFT_CAP,
            PRECISION,
        )
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        if is_whole:
            out_ptrs = out_ptr + token * out_stride_t + head * out_stride_h
            tl.store(
                out_ptrs[:, None] + v_column[None, :],
                acc.to(out_ptr.dtype.element_ty),
                mask=used[:, None] & (v_column < V)[None, :],
            )
        elif SPLIT:
            if SHARED:
                pair = row * tl.num_programs(1) + kv_head
                first_part = kv_head * tl.num_programs(0) + tl.program_id(0) - split
                origin = first_part.to(tl.int64) * BLOCK_M
            else:
                pair = tl.program_id(0) * tl.num_programs(1) + kv_head
                origin = pair.to(tl.int64) * num_splits * BLOCK_M
            slot = origin + split * BLOCK_M + member
            tl.store(
                partial_ptr + slot[:, None] * BLOCK_V + v_column[None, :], acc, mask=used[:, None]
            )
            lse = tl.where(total == 0.0, float("-inf"), highest + tl.log2(total))
            tl.store(lse_ptr + slot, lse, mask=used)
            tl.debug_barrier()  # all stores of the program come before its count
            arrived_ptr += pair * (PARTS + 1)
            group = split // PARTS
            num_groups = tl.cdiv(num_parts, PARTS)
            num_members = tl.minimum(num_queries - first_query, TOKENS) * G
            count = tl.minimum(num_parts - group * PARTS, PARTS)
            if tl.atomic_add(arrived_ptr + group, 1, sem="acq_rel") == count - 1:
                tl.store(arrived_ptr + group, 0)
                stride = BLOCK_M
                is_last = True
                if num_groups > 1:
                    merge_group(
                        partial_ptr,
                        lse_ptr,
                        origin + group * PARTS * BLOCK_M,
                        count,
                        num_members,
                        BLOCK_M,
                        BLOCK_V,
                        MEMBERS,
                        PARTS,
                    )
                    tl.debug_barrier()
                    is_last = tl.atomic_add(arrived_ptr + PARTS, 1, sem="acq_rel") == num_groups - 1
                    count = num_groups
                    stride = PARTS * BLOCK_M
                if is_last:
                    tl.store(arrived_ptr + PARTS, 0)
                    num_shared = 0
                    if SHARED:
                        if PDL:
                            gdc_wait()  # for the results of the shared keys
                        share = keys_per_split(shared, num_shared_splits, 1, SHARED_BLOCK_N)
                        num_shared = tl.cdiv(shared, share)
                    merge(
                        out_ptr,
                        partial_ptr,
                        lse_ptr,
                        origin,
                        stride,
                        count,
                        shared_partial_ptr,
                        shared_lse_ptr,
                        num_shared_splits,
                        num_shared,
                        row,
                        kv_head,
                        start_token + first_query,
                        num_members,
                        out_stride_t,
                        out_stride_h,
                        G,
                        V,
                        BLOCK_V,
                        MEMBERS,
                        PARTS,
                    )
    if PDL and SHARED:
        gdc_wait()  # the next kernel waits only for this one, but reads the results of both
