"""The op `mla_write`: rotate queries and write the entries of a latent cache, in one launch.

A cache is [B, block_size, L + R]; an entry is the normalized latent (L values), then the rotated key part (R values).
"""

from __future__ import annotations

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_core.api import Problem
from tokenspeed_kernels.triton import precompile
from tokenspeed_kernels.triton.attention.write_kv import narrowed
from tokenspeed_kernels.triton.pdl import supports_pdl
from tokenspeed_kernels.triton.rope.rope import HEADS, NUM_WARPS, rotate_in_place


@precompile.jit(do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"])
def _write(
    q_ptr,
    kv_ptr,
    weight_ptr,
    cache_ptr,
    positions_ptr,
    cos_sin_ptr,
    slots_ptr,
    eps,
    inverse_scale,
    q_stride_t,
    q_stride_h,
    kv_stride_t,
    cache_stride_b,
    cache_stride_s,
    cos_sin_stride,
    H: tl.constexpr,
    N: tl.constexpr,
    L: tl.constexpr,
    R: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rotate HEADS query heads of a token in place, or write the token's cache entry.

    Grid (T, tiles of heads + 1). PDL: see `pdl`.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    Q_BLOCKS: tl.constexpr = (H + HEADS - 1) // HEADS
    HALF: tl.constexpr = R // 2
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    angles_ptr = cos_sin_ptr + tl.load(positions_ptr + token) * cos_sin_stride
    if block < Q_BLOCKS:
        rotate_in_place(
            q_ptr + N,
            token,
            q_stride_t,
            q_stride_h,
            weight_ptr,
            eps,
            angles_ptr,
            block,
            H,
            R,
            R,
            HEADS,
            BLOCK_PAIRS,
            1,
            INTERLEAVED,
            False,
        )
    else:
        slot = tl.load(slots_ptr + token)
        column, pair = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_PAIRS)
        kv = kv_ptr + token * kv_stride_t
        stored = tl.load(kv + column, mask=column < L, other=0.0)
        latent = stored.to(tl.float32)
        latent = latent * tl.rsqrt(tl.sum(latent * latent) / L + eps)
        weight = tl.load(weight_ptr + column, mask=column < L, other=0.0).to(tl.float32)
        latent = (latent.to(stored.dtype).to(tl.float32) * weight).to(stored.dtype).to(tl.float32)
        first = pair * 2 if INTERLEAVED else pair
        second = first + 1 if INTERLEAVED else first + HALF
        there = pair < HALF
        a = tl.load(kv + L + first, mask=there, other=0.0).to(tl.float32)
        b = tl.load(kv + L + second, mask=there, other=0.0).to(tl.float32)
        cos = tl.load(angles_ptr + pair, mask=there, other=0.0).to(tl.float32)
        sin = tl.load(angles_ptr + HALF + pair, mask=there, other=0.0).to(tl.float32)
        turned_a = (a * cos - b * sin).to(stored.dtype).to(tl.float32)
        turned_b = (b * cos + a * sin).to(stored.dtype).to(tl.float32)
        entry = cache_ptr + slot // BLOCK_SIZE * cache_stride_b + slot % BLOCK_SIZE * cache_stride_s
        dtype: tl.constexpr = cache_ptr.dtype.element_ty
        if slot >= 0:
            tl.store(entry + column, narrowed(latent * inverse_scale, dtype), mask=column < L)
            tl.store(entry + L + first, narrowed(turned_a * inverse_scale, dtype), mask=there)
            tl.store(entry + L + second, narrowed(turned_b * inverse_scale, dtype), mask=there)


def mla_write(problem: Problem) -> Callable[..., None]:
    """Return `write(q, kv, norm_weight, eps, positions, cos_sin, interleaved, cache, slots, kv_scale) -> None`."""
    num_heads, latent_size = problem["num_heads"], problem["latent_size"]
    rope_size, nope_size = problem["rope_size"], problem["nope_size"]
    pdl = supports_pdl()

    def write(
        q: Tensor,
        kv: Tensor,
        norm_weight: Tensor,
        eps: float,
        positions: Tensor,
        cos_sin: Tensor,
        interleaved: bool,
        cache: Tensor,
        slots: Tensor,
        kv_scale: float,
    ) -> None:
        if q.shape[0] == 0:
            return
        _write[(q.shape[0], triton.cdiv(num_heads, HEADS) + 1)](
            q,
            kv,
            norm_weight,
            cache,
            positions,
            cos_sin,
            slots,
            eps,
            1.0 / kv_scale,
            q.stride(0),
            q.stride(1),
            kv.stride(0),
            cache.stride(0),
            cache.stride(1),
            cos_sin.stride(0),
            H=num_heads,
            N=nope_size,
            L=latent_size,
            R=rope_size,
            BLOCK_SIZE=problem["block_size"],
            HEADS=HEADS,
            BLOCK_L=triton.next_power_of_2(latent_size),
            BLOCK_PAIRS=triton.next_power_of_2(rope_size // 2),
            INTERLEAVED=interleaved,
            PDL=pdl,
            num_warps=NUM_WARPS,
            launch_pdl=pdl,
        )

    blank, dtype = precompile.blank, problem["dtype"]
    width, longs = latent_size + rope_size, blank("int64", 2)
    cache = blank(problem["kv_dtype"], 2, 2, problem["block_size"], width)[:, 0]
    for interleaved in (False, True):
        precompile.compile_for(
            write,
            blank(dtype, 2, num_heads, nope_size + rope_size),
            blank(dtype, 2, 2 * width)[:, :width],
            blank(dtype, latent_size),
            1e-6,
            longs,
            blank("float32", 2, rope_size),
            interleaved,
            cache,
            longs,
            1.0,
        )
    return write
