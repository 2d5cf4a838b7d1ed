"""The op `write_kv`: write keys and values into the paged KV cache (PagedAttention, Kwon et al., 2023).

KV slot s of a cache [B, block_size, K, D] is entry s % block_size of block s // block_size.
"""

from __future__ import annotations

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_core.api import Problem
from tokenspeed_kernels.triton import precompile


@triton.jit
def narrowed(x, dtype: tl.constexpr):
    """Cast x, clamping to the range of e4m3."""
    if dtype == tl.float8e4nv:
        x = tl.minimum(tl.maximum(x.to(tl.float32), -448.0), 448.0)
    return x.to(dtype)


@precompile.jit(do_not_specialize_on_alignment=["slots_ptr"])
def _write_kv(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    k_stride_t,
    k_stride_h,
    v_stride_t,
    v_stride_h,
    k_cache_stride_b,
    k_cache_stride_s,
    k_cache_stride_h,
    v_cache_stride_b,
    v_cache_stride_s,
    v_cache_stride_h,
    BLOCK_SIZE: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot >= 0:
        head = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)[:, None]
        column = tl.arange(0, BLOCK_D)[None, :]
        v_column = tl.arange(0, BLOCK_V)[None, :]
        mask = (head < K) & (column < D)
        v_mask = (head < K) & (v_column < V)
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        k = tl.load(k_ptr + token * k_stride_t + head * k_stride_h + column, mask=mask)
        v = tl.load(v_ptr + token * v_stride_t + head * v_stride_h + v_column, mask=v_mask)
        k_to = k_cache_ptr + block * k_cache_stride_b + offset * k_cache_stride_s
        v_to = v_cache_ptr + block * v_cache_stride_b + offset * v_cache_stride_s
        k_dtype: tl.constexpr = k_cache_ptr.dtype.element_ty
        v_dtype: tl.constexpr = v_cache_ptr.dtype.element_ty
        tl.store(k_to + head * k_cache_stride_h + column, narrowed(k, k_dtype), mask=mask)
        tl.store(v_to + head * v_cache_stride_h + v_column, narrowed(v, v_dtype), mask=v_mask)


def write_kv(problem: Problem) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]:
    """Return `write(k [T, K, D], v [T, K, V], k_cache [B, block_size, K, D], v_cache, slots [T]) -> None`.

    A negative slot is skipped. Values are clamped to the range of an FP8 cache.
    """
    num_heads, head_size = problem["num_kv_heads"], problem["head_size"]
    value_head_size = problem["value_head_size"] or head_size
    block_d, block_v = (triton.next_power_of_2(size) for size in (head_size, value_head_size))
    block_k = min(triton.next_power_of_2(num_heads), max(1, 2048 // max(block_d, block_v)))

    def write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        if k.shape[0] == 0:
            return
        _write_kv[(k.shape[0], triton.cdiv(num_heads, block_k))](
            k,
            v,
            k_cache,
            v_cache,
            slots,
            k.stride(0),
            k.stride(1),
            v.stride(0),
            v.stride(1),
            *k_cache.stride()[:3],
            *v_cache.stride()[:3],
            BLOCK_SIZE=problem["block_size"],
            K=num_heads,
            D=head_size,
            V=value_head_size,
            BLOCK_K=block_k,
            BLOCK_D=block_d,
            BLOCK_V=block_v,
        )

    k, v = (
        precompile.blank(problem["dtype"], 2, 3 * num_heads, size)[:, :num_heads]
        for size in (head_size, value_head_size)
    )
    caches = blank_caches(
        problem["kv_dtype"], problem["block_size"], num_heads, head_size, value_head_size
    )
    precompile.compile_for(write, k, v, *caches, precompile.blank("int64", 2))
    return write


def blank_caches(
    dtype: str, block_size: int, num_heads: int, head_size: int, value_head_size: int
) -> tuple[Tensor, Tensor]:
    """Return blank caches for `precompile`: [2, block_size, K, D] and [2, block_size, K, V], strided on blocks."""
    num_keys = block_size * num_heads * head_size
    arena = precompile.blank(dtype, 2, num_keys + block_size * num_heads * value_head_size)
    return (
        arena[:, :num_keys].unflatten(1, (block_size, num_heads, head_size)),
        arena[:, num_keys:].unflatten(1, (block_size, num_heads, value_head_size)),
    )
