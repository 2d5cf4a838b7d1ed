# mypy: allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators, allow-untyped-defs, no-warn-return-any
"""MLA decode kernels for the tensor cores of compute capability 10.0.

A block of the cache is loaded once with TMA and serves as keys and as values. Its entries are the rows of the GEMMs,
of which `tcgen05` needs many, and the few heads of a tile are the columns. A row's blocks are split over programs, and
partial results are merged by their log-sum-exps, as in FlashDecoding (Dao et al., 2023). Softmax is online (Milakov
and Gimelshein, 2018); scores are in base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _attend_entries(
    acc,
    highest,
    total,
    q,
    q_rope,
    start,
    stop,
    latent_desc,
    rope_desc,
    table,
    log2_scale,
    L: tl.constexpr,
    R: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    STEP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Attend to entries [start, stop), STEP per iteration. With MASKED, entries from `stop` on may be NaN."""
    for first in tl.range(start, stop, STEP, num_stages=1 if MASKED else 2):
        block, place = tl.load(table + first // BLOCK_SIZE), first % BLOCK_SIZE
        latent = latent_desc.load([block, place, 0]).reshape(STEP, L)
        rotated = rope_desc.load([block, place, L]).reshape(STEP, R)
        scores = tl.dot(rotated, q_rope.T, tl.dot(latent, q.T))
        inside = first + tl.arange(0, STEP) < stop
        if MASKED:
            scores = tl.where(inside[:, None], scores, float("-inf"))
        # Finite, because the first entry is never masked.
        new_highest = tl.maximum(highest, tl.max(scores, axis=0) * log2_scale)
        p = tl.exp2(scores * log2_scale - new_highest[None, :])
        keep = tl.exp2(highest - new_highest)
        total = total * keep + tl.sum(p, axis=0)
        if MASKED:
            # Unwritten values may be NaN, and NaN times a weight of zero is NaN.
            latent = tl.where(inside[:, None], latent, 0.0)
        acc = tl.dot(latent.T, p.to(q.dtype), acc * keep[None, :])
        highest = new_highest
    return acc, highest, total


@triton.jit(do_not_specialize_on_alignment=["seq_lens_ptr"])
def attend(
    q_ptr,
    latent_desc,
    rope_desc,
    latent_tail_desc,
    rope_tail_desc,
    part_ptr,
    lse_ptr,
    seq_lens_ptr,
    table_ptr,
    log2_scale,
    q_stride_t,
    q_stride_h,
    table_stride,
    H: tl.constexpr,
    L: tl.constexpr,
    R: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Attend to the cache entries of each row. Grid (head tiles, rows, splits).

    part is [T, H, splits, L]; lse is float32 [T, H, splits], -inf for empty splits.

    The rest of a row's last block is processed TAIL entries at a time: masking a whole block needs too many registers.
    """
    row, split, num_splits = tl.program_id(1).to(tl.int64), tl.program_id(2), tl.num_programs(2)
    head = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    used = (head < H)[:, None]
    q_row, at = q_ptr + row * q_stride_t, (head * q_stride_h)[:, None]
    q = tl.load(q_row + (at + tl.arange(0, L)[None, :]), mask=used, other=0.0)
    q_rope = tl.load(q_row + (at + L + tl.arange(0, R)[None, :]), mask=used, other=0.0)
    length = tl.load(seq_lens_ptr + row)
    share = tl.cdiv(tl.cdiv(length, BLOCK_SIZE), num_splits) * BLOCK_SIZE
    start = tl.minimum(split * share, length)
    stop = tl.minimum(start + share, length)
    whole = start + (stop - start) // BLOCK_SIZE * BLOCK_SIZE
    table = table_ptr + row * table_stride
    acc = tl.zeros([L, BLOCK_H], dtype=tl.float32)
    highest = tl.full([BLOCK_H], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_H], dtype=tl.float32)
    acc, highest, total = _attend_entries(
        acc,
        highest,
        total,
        q,
        q_rope,
        start,
        whole,
        latent_desc,
        rope_desc,
        table,
        log2_scale,
        L,
        R,
        BLOCK_SIZE,
        BLOCK_SIZE,
        False,
    )
    acc, highest, total = _attend_entries(
        acc,
        highest,
        total,
        q,
        q_rope,
        whole,
        stop,
        latent_tail_desc,
        rope_tail_desc,
        table,
        log2_scale,
        L,
        R,
        BLOCK_SIZE,
        TAIL,
        True,
    )
    acc = acc / tl.where(total == 0.0, 1.0, total)[None, :]
    first, cell = row * H * num_splits, head * num_splits + split
    parts = part_ptr + first * L + (cell[None, :] * L + tl.arange(0, L)[:, None])
    tl.store(parts, acc.to(part_ptr.dtype.element_ty), mask=(head < H)[None, :])
    tl.store(lse_ptr + first + cell, highest + tl.log2(total), mask=head < H)


@triton.jit
def merge(part_ptr, lse_ptr, y_ptr, num_splits, L: tl.constexpr, SPLITS: tl.constexpr):
    """Merge the splits into y [T, H, L]; zeros for rows without entries. Grid (T * H)."""
    cell = tl.program_id(0).to(tl.int64)
    split, column = tl.arange(0, SPLITS), tl.arange(0, L)
    lse = tl.load(lse_ptr + cell * num_splits + split, mask=split < num_splits, other=float("-inf"))
    highest = tl.max(lse, axis=0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.sum(tl.exp2(lse - base), axis=0)
    acc = tl.zeros([L], dtype=tl.float32)
    for index in range(num_splits):
        weight = tl.exp2(tl.load(lse_ptr + cell * num_splits + index) - base)
        acc += weight * tl.load(part_ptr + (cell * num_splits + index) * L + column)
    tl.store(
        y_ptr + cell * L + column,
        (acc / tl.where(total == 0.0, 1.0, total)).to(y_ptr.dtype.element_ty),
    )
