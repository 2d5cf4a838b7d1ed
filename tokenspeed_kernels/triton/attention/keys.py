"""Attention of a tile of queries to a range of paged keys, with an online softmax (Milakov and Gimelshein, 2018).

Scores are in base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_core.api import AttentionProblem

LOG2_E = 1.4426950408889634
BASE2 = tl.constexpr(LOG2_E)


@triton.jit
def _cap_scores(scores, bound: tl.constexpr):
    """Return bound * tanh(scores / bound)."""
    return bound - 2.0 * bound / (1.0 + tl.exp2(scores * (2.0 * BASE2 / bound)))


@triton.jit
def fit_keys(q, key_dtype: tl.constexpr):
    """Cast queries for an FP8 cache to float16, which holds e4m3 exactly; one instruction converts two keys."""
    if key_dtype == tl.float8e4nv:
        q = tl.minimum(tl.maximum(q.to(tl.float32), -65504.0), 65504.0).to(tl.float16)
    return q


@triton.jit
def _first_seen(position, window, IS_CHUNKED: tl.constexpr):
    """Return the first position that query positions see in their window or chunk. It may be negative."""
    if IS_CHUNKED:
        return position // window * window
    return position - window + 1


@triton.jit
def attend_keys(
    acc,
    highest,
    total,
    q,
    position,
    last_seen,
    start,
    stop,
    k_base,
    v_base,
    table,
    stride_b,
    stride_s,
    v_stride_s,
    window,
    log2_scale,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_CHUNKED: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend to keys [start, stop) and return the updated softmax state.

    `position` [BLOCK_M] and `last_seen` [BLOCK_M], the last key that each query sees, are used only if MASKED.

    SOFT_CAP is the bound of scores in base 2, or None.
    """
    column = tl.arange(0, BLOCK_D)
    v_column = tl.arange(0, BLOCK_V)
    factor = log2_scale
    if SOFT_CAP is not None:
        factor = 1.0
    for first in tl.range(start, stop, BLOCK_N):
        key = first + tl.arange(0, BLOCK_N)
        if MASKED:
            inside = key < stop
            block = tl.load(table + key // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
            mask = inside[:, None] & (column < D)[None, :]
            v_mask = inside[:, None] & (v_column < V)[None, :]
        else:
            block = tl.load(table + key // BLOCK_SIZE).to(tl.int64)
            mask = (column < D)[None, :] & (key >= 0)[:, None]
            v_mask = (v_column < V)[None, :] & (key >= 0)[:, None]
        offset = block * stride_b + (key % BLOCK_SIZE) * stride_s
        v_offset = offset
        if V != D:
            v_offset = block * stride_b + (key % BLOCK_SIZE) * v_stride_s
        k_ptrs = k_base + offset
        v_ptrs = v_base + v_offset
        if MASKED or D < BLOCK_D:
            k = tl.load(k_ptrs[:, None] + column[None, :], mask=mask, other=0.0)
        else:
            k = tl.load(k_ptrs[:, None] + column[None, :])
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION)
        if SOFT_CAP is not None:
            scores = _cap_scores(scores * log2_scale, SOFT_CAP)
        if MASKED:
            seen = (key[None, :] <= last_seen[:, None]) & inside[None, :]
            if HAS_WINDOW:
                seen = seen & (key[None, :] >= _first_seen(position, window, IS_CHUNKED)[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, axis=1) * factor)
        if MASKED:
            base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        else:
            base = new_highest
        p = tl.exp2(scores * factor - base[:, None])
        keep = tl.exp2(highest - base)
        total = total * keep + tl.sum(p, axis=1)
        if MASKED or V < BLOCK_V:
            v = tl.load(v_ptrs[:, None] + v_column[None, :], mask=v_mask, other=0.0)
        else:
            v = tl.load(v_ptrs[:, None] + v_column[None, :])
        acc = acc * keep[:, None]
        acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc, input_precision=PRECISION)
        highest = new_highest
    return acc, highest, total


def soft_cap(problem: AttentionProblem) -> float | None:
    """Return the bound of scores in base 2, for the kernels' SOFT_CAP."""
    return None if problem.soft_cap is None else problem.soft_cap * LOG2_E


@triton.jit
def first_key(
    first_query,
    window,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_CHUNKED: tl.constexpr,
):
    """Return the first key that a query position sees, rounded down to BLOCK_N."""
    if HAS_WINDOW:
        first = _first_seen(first_query, window, IS_CHUNKED)
        return tl.maximum(first, 0) // BLOCK_N * BLOCK_N
    return tl.zeros([], dtype=tl.int32)


@triton.jit
def keys_per_split(num_keys, num_splits, min_split, BLOCK_N: tl.constexpr):
    """Return the number of keys per split: a multiple of BLOCK_N, at least `min_split`."""
    return tl.maximum(tl.cdiv(tl.cdiv(num_keys, BLOCK_N), num_splits) * BLOCK_N, min_split)
