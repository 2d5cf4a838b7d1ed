"""Merging of partial attention results by their log-sum-exps, as in FlashDecoding (Dao et al., 2023)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _merge_parts(
    partial_ptr,
    lse_ptr,
    origin,
    stride,
    num_parts,
    place,
    BLOCK_V: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Merge up to PARTS partial results of some query heads, stored at origin + place + part * stride.

    Returns the merged values [heads, BLOCK_V] and their log-sum-exps [heads]. A thread has the same elements of all
    parts, so only the weights of the parts are exchanged.
    """
    column = tl.arange(0, BLOCK_V)
    parts = tl.arange(0, PARTS)
    # `.cg` bypasses the L1 cache, which may not have the writes of other multiprocessors.
    lse = tl.load(
        lse_ptr + origin + parts[None, :] * stride + place[:, None],
        mask=(parts < num_parts)[None, :],
        other=float("-inf"),
        cache_modifier=".cg",
    )
    highest = tl.max(lse, axis=1)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(lse - base[:, None])
    total = tl.sum(weights, axis=1)
    acc = tl.zeros([place.shape[0], BLOCK_V], dtype=tl.float32)
    # Four loads are in flight. Unrolled completely, it is as fast, and compiles for longer.
    for part in tl.range(0, PARTS, loop_unroll_factor=4):
        is_one = tl.full(place.shape, part, dtype=tl.int32) < num_parts
        cells = partial_ptr + (origin + part * stride + place)[:, None] * BLOCK_V + column[None, :]
        partial = tl.load(cells, mask=is_one[:, None], other=0.0, cache_modifier=".cg")
        weight = tl.sum(tl.where((parts == part)[None, :], weights, 0.0), axis=1)
        acc += partial * weight[:, None]
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    return acc, tl.where(total == 0.0, float("-inf"), highest + tl.log2(total))


@triton.jit
def merge_group(
    partial_ptr,
    lse_ptr,
    origin,
    num_parts,
    num_members,
    BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
    MEMBERS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Merge partial results of a tile of query heads into the first of them."""
    for first in range(0, num_members, MEMBERS):
        member = tl.minimum(first + tl.arange(0, MEMBERS), num_members - 1)
        acc, lse = _merge_parts(
            partial_ptr, lse_ptr, origin, BLOCK_M, num_parts, member, BLOCK_V, PARTS
        )
        tl.debug_barrier()  # all threads must have read the buffer before it is overwritten
        cells = (
            partial_ptr
            + origin * BLOCK_V
            + member[:, None] * BLOCK_V
            + tl.arange(0, BLOCK_V)[None, :]
        )
        tl.store(cells, acc)
        tl.store(lse_ptr + origin + member, lse)


@triton.jit
def merge(
    out_ptr,
    partial_ptr,
    lse_ptr,
    origin,
    stride,
    num_parts,
    shared_partial_ptr,
    shared_lse_ptr,
    num_shared_splits,
    num_shared,
    row,
    kv_head,
    start_token,
    num_members,
    out_stride_t,
    out_stride_h,
    G: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    MEMBERS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Merge a tile's partial results and those of `num_shared` splits of the shared keys, and store the output."""
    column = tl.arange(0, BLOCK_V)
    for first in range(0, num_members, MEMBERS):
        member = tl.minimum(first + tl.arange(0, MEMBERS), num_members - 1)
        head = kv_head * G + member % G
        acc, lse = _merge_parts(
            partial_ptr, lse_ptr, origin, stride, num_parts, member, BLOCK_V, PARTS
        )
        if num_shared > 0:
            shared_origin = (
                (row * tl.num_programs(1) + kv_head).to(tl.int64) * G * num_shared_splits
            )
            shared_acc, shared_lse = _merge_parts(
                shared_partial_ptr,
                shared_lse_ptr,
                shared_origin,
                1,
                num_shared,
                member * num_shared_splits,
                BLOCK_V,
                PARTS,
            )
            highest = tl.maximum(lse, shared_lse)
            weight = tl.exp2(lse - highest)
            shared_weight = tl.exp2(shared_lse - highest)
            acc = acc * weight[:, None] + shared_acc * shared_weight[:, None]
            acc = acc / (weight + shared_weight)[:, None]
        token = (start_token + member // G).to(tl.int64)
        out_ptrs = (out_ptr + token * out_stride_t + head * out_stride_h)[:, None] + column[None, :]
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=(column < V)[None, :])
