"""Rotary embedding of q and k in one launch, alone or behind a norm of each head."""

from __future__ import annotations

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_core.api import Problem

HEADS = 4  # heads of one program

Rope = Callable[[Tensor, Tensor, Tensor, Tensor, bool], None]
NormRope = Callable[[Tensor, Tensor, Tensor, Tensor, float, Tensor, Tensor, bool], None]


@triton.jit
def _load(ptr, mask):
    return tl.load(ptr, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _rotate_heads(
    x_ptr, stride_t, stride_h, weight_ptr, eps, token, head, num_heads, cos, sin, pair,
    D: tl.constexpr, R: tl.constexpr, BLOCK_REST: tl.constexpr, INTERLEAVED: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Norm and rotate heads [HEADS] of one token in place; cos, sin [BLOCK_PAIRS]."""
    HALF: tl.constexpr = R // 2
    first = pair * 2 if INTERLEAVED else pair
    second = first + 1 if INTERLEAVED else first + HALF
    mask = (head < num_heads)[:, None] & (pair < HALF)[None, :]
    base = x_ptr + token * stride_t + head[:, None] * stride_h
    stored = tl.load(base + first[None, :], mask=mask, other=0.0)
    a = stored.to(tl.float32)
    b = _load(base + second[None, :], mask)
    if HAS_NORM:
        squares = tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)
        rest = R + tl.arange(0, BLOCK_REST)
        rest_mask = (head < num_heads)[:, None] & (rest < D)[None, :]
        if D > R:
            c = _load(base + rest[None, :], rest_mask)
            squares += tl.sum(c * c, axis=1)
        scale = tl.rsqrt(squares / D + eps)[:, None]
        a = (a * scale).to(stored.dtype).to(tl.float32) * _load(weight_ptr + first, pair < HALF)[None, :]
        b = (b * scale).to(stored.dtype).to(tl.float32) * _load(weight_ptr + second, pair < HALF)[None, :]
        if D > R:
            c = (c * scale).to(stored.dtype).to(tl.float32) * _load(weight_ptr + rest, rest < D)[None, :]
            tl.store(base + rest[None, :], c.to(stored.dtype), mask=rest_mask)
        a = a.to(stored.dtype).to(tl.float32)
        b = b.to(stored.dtype).to(tl.float32)
    tl.store(base + first[None, :], (a * cos[None, :] - b * sin[None, :]).to(stored.dtype), mask=mask)
    tl.store(base + second[None, :], (b * cos[None, :] + a * sin[None, :]).to(stored.dtype), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["positions_ptr"])
def _rope(
    q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, eps, positions_ptr, cos_sin_ptr,
    q_stride_t, q_stride_h, k_stride_t, k_stride_h, cos_sin_stride,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, R: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr, BLOCK_REST: tl.constexpr, INTERLEAVED: tl.constexpr, HAS_NORM: tl.constexpr,
):
    HALF: tl.constexpr = R // 2
    Q_BLOCKS: tl.constexpr = (H + HEADS - 1) // HEADS
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    pair = tl.arange(0, BLOCK_PAIRS)
    angles = cos_sin_ptr + tl.load(positions_ptr + token) * cos_sin_stride + pair
    cos = tl.load(angles, mask=pair < HALF, other=0.0)
    sin = tl.load(angles + HALF, mask=pair < HALF, other=0.0)
    head = tl.arange(0, HEADS)
    if block < Q_BLOCKS:
        _rotate_heads(
            q_ptr, q_stride_t, q_stride_h, q_weight_ptr, eps, token, block * HEADS + head, H, cos, sin, pair,
            D, R, BLOCK_REST, INTERLEAVED, HAS_NORM,
        )
    else:
        _rotate_heads(
            k_ptr, k_stride_t, k_stride_h, k_weight_ptr, eps, token, (block - Q_BLOCKS) * HEADS + head, K,
            cos, sin, pair, D, R, BLOCK_REST, INTERLEAVED, HAS_NORM,
        )


def rope(problem: Problem) -> Rope:
    """Return `rope(q [T, H, D], k [T, K, D], positions [T], cos_sin [P, R], interleaved) -> None`."""
    launch = _launcher(problem)

    def rotate(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool) -> None:
        launch(q, k, None, None, 0.0, positions, cos_sin, interleaved)

    return rotate


def qk_norm_rope(problem: Problem) -> NormRope:
    """Return `norm_rope(q, k, q_weight [D], k_weight [D], eps, positions, cos_sin, interleaved) -> None`."""
    launch = _launcher(problem)

    def norm_rotate(
        q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float,
        positions: Tensor, cos_sin: Tensor, interleaved: bool,
    ) -> None:
        launch(q, k, q_weight, k_weight, eps, positions, cos_sin, interleaved)

    return norm_rotate


def _launcher(problem: Problem) -> Callable[..., None]:
    num_heads, num_kv_heads = problem["num_heads"], problem["num_kv_heads"]
    head_size, rotary_size = problem["head_size"], problem["rotary_size"]
    num_blocks = triton.cdiv(num_heads, HEADS) + triton.cdiv(num_kv_heads, HEADS)

    def launch(
        q: Tensor, k: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, eps: float,
        positions: Tensor, cos_sin: Tensor, interleaved: bool,
    ) -> None:
        if q.shape[0] == 0:
            return
        _rope[(q.shape[0], num_blocks)](
            q, k, q_weight, k_weight, eps, positions, cos_sin,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), cos_sin.stride(0),
            H=num_heads, K=num_kv_heads, D=head_size, R=rotary_size, HEADS=HEADS,
            BLOCK_PAIRS=triton.next_power_of_2(rotary_size // 2),
            BLOCK_REST=triton.next_power_of_2(max(1, head_size - rotary_size)),
            INTERLEAVED=interleaved, HAS_NORM=q_weight is not None, num_warps=2,
        )

    return launch
