"""The ops `rope_write_kv` and `qk_norm_rope_write_kv`: RoPE and the KV cache write in one launch.

q is [T, H, D], k and v [T, K, D], and a cache [B, block_size, K, D]. The second op applies an RMS norm to each head of
q and k first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_core.api import Problem
from tokenspeed_kernels.triton import precompile
from tokenspeed_kernels.triton.pdl import supports_pdl
from tokenspeed_kernels.triton.rope.rope import head_blocks, rotate_heads, rotate_in_place

RopeWrite = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool], None]
NormRopeWrite = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float, Tensor, Tensor, bool],
    None,
]


@precompile.jit(do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"])
def _rope_write_kv(
    q_ptr,
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    q_weight_ptr,
    k_weight_ptr,
    eps,
    positions_ptr,
    cos_sin_ptr,
    q_stride_t,
    q_stride_h,
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
    cos_sin_stride,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rotate HEADS query heads of a token in place, or rotate HEADS KV heads and write them to the cache.

    Grid (T, tiles of heads).

    PDL: see `pdl`. The wait comes before `gdc_launch_dependents`, so that the many programs of the following
    attention kernel start only after the previous kernel: earlier, they would occupy the multiprocessors unevenly.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    Q_BLOCKS: tl.constexpr = (H + HEADS - 1) // HEADS
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    angles_ptr = cos_sin_ptr + tl.load(positions_ptr + token) * cos_sin_stride
    if block < Q_BLOCKS:
        rotate_in_place(
            q_ptr,
            token,
            q_stride_t,
            q_stride_h,
            q_weight_ptr,
            eps,
            angles_ptr,
            block,
            H,
            D,
            R,
            HEADS,
            BLOCK_PAIRS,
            BLOCK_REST,
            INTERLEAVED,
            HAS_NORM,
        )
    else:
        head = (block - Q_BLOCKS) * HEADS + tl.arange(0, HEADS)
        slot = tl.load(slots_ptr + token)
        num_kept = tl.where(slot >= 0, K, 0)
        cached, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        v_row, column = (
            v_ptr + token * v_stride_t + head[:, None] * v_stride_h,
            tl.arange(0, BLOCK_D)[None, :],
        )
        v = tl.load(v_row + column, mask=(head < K)[:, None] & (column < D))
        rotate_heads(
            k_ptr + token * k_stride_t,
            k_stride_h,
            k_cache_ptr + cached * k_cache_stride_b + offset * k_cache_stride_s,
            k_cache_stride_h,
            k_weight_ptr,
            eps,
            angles_ptr,
            head,
            K,
            num_kept,
            D,
            R,
            BLOCK_PAIRS,
            BLOCK_REST,
            INTERLEAVED,
            HAS_NORM,
        )
        v_to = (
            v_cache_ptr
            + cached * v_cache_stride_b
            + offset * v_cache_stride_s
            + head[:, None] * v_cache_stride_h
        )
        tl.store(
            v_to + column,
            v.to(v_cache_ptr.dtype.element_ty),
            mask=(head < num_kept)[:, None] & (column < D),
        )


def rope_write_kv(problem: Problem) -> RopeWrite:
    """Return the kernel of the op `rope_write_kv`; k stays unchanged."""
    launch = _launcher(problem)

    def place(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slots: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        interleaved: bool,
    ) -> None:
        launch(q, k, v, k_cache, v_cache, slots, None, None, 0.0, positions, cos_sin, interleaved)

    _precompile(launch, problem, has_norm=False)
    return place


def qk_norm_rope_write_kv(problem: Problem) -> NormRopeWrite:
    """Return the kernel of the op `qk_norm_rope_write_kv`; k stays unchanged."""
    launch = _launcher(problem)
    _precompile(launch, problem, has_norm=True)
    return launch


def _precompile(launch: Callable[..., None], problem: Problem, *, has_norm: bool) -> None:
    num_heads, num_kv_heads = problem["num_heads"], problem["num_kv_heads"]
    size: int = problem["head_size"]
    blank = partial(precompile.blank, problem["dtype"])
    qkv = blank(1, num_heads + 2 * num_kv_heads, size)
    weight = blank(size)
    longs = precompile.blank("int64", 1)
    cache = precompile.blank(problem["kv_dtype"], 2, 2, problem["block_size"], num_kv_heads, size)
    precompile.compile_for(
        launch,
        *qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1),
        *cache.unbind(1),
        longs,
        *((weight, weight, 0.0) if has_norm else (None, None, 0.0)),
        longs,
        precompile.blank("float32", 1, problem["rotary_size"]),
        False,
    )


def _launcher(problem: Problem) -> Callable[..., None]:
    num_blocks, sizes = head_blocks(problem)
    block_d = triton.next_power_of_2(problem["head_size"])
    pdl = supports_pdl()

    def launch(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slots: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
        positions: Tensor,
        cos_sin: Tensor,
        interleaved: bool,
    ) -> None:
        if q.shape[0] == 0:
            return
        _rope_write_kv[(q.shape[0], num_blocks)](
            q,
            k,
            v,
            k_cache,
            v_cache,
            slots,
            q_weight,
            k_weight,
            eps,
            positions,
            cos_sin,
            q.stride(0),
            q.stride(1),
            k.stride(0),
            k.stride(1),
            v.stride(0),
            v.stride(1),
            *k_cache.stride()[:3],
            *v_cache.stride()[:3],
            cos_sin.stride(0),
            BLOCK_SIZE=problem["block_size"],
            BLOCK_D=block_d,
            INTERLEAVED=interleaved,
            HAS_NORM=q_weight is not None,
            PDL=pdl,
            **sizes,
            launch_pdl=pdl,
        )

    return launch
