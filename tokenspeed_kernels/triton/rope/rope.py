"""The ops `rope` and `qk_norm_rope`: rotary position embedding (RoPE, arXiv:2104.09864) of q and k in one launch.

q is [T, H, D] and k [T, K, D]. `qk_norm_rope` applies an RMS norm to each head first.
"""

from __future__ import annotations

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_core.api import Problem

# Heads and warps per program. With fewer heads, starting the programs dominates.
HEADS, NUM_WARPS = 8, 4

Rope = Callable[[Tensor, Tensor, Tensor, Tensor, bool], None]
NormRope = Callable[[Tensor, Tensor, Tensor, Tensor, float, Tensor, Tensor, bool], None]


@triton.jit
def _load(ptr, mask):
    return tl.load(ptr, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def rotate_heads(
    x_ptr,
    stride_h,
    out_ptr,
    out_stride_h,
    weight_ptr,
    eps,
    angles_ptr,
    head,
    num_heads,
    num_kept,
    D: tl.constexpr,
    R: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Normalize (HAS_NORM) and rotate `head` [HEADS] of one token by its cosines and sines.

    The first `num_kept` heads are stored to `out`, which may be x. Independent loads come first: loads of the angles
    depend on the token's position, and stores on its slot.
    """
    HALF: tl.constexpr = R // 2
    pair, rest = tl.arange(0, BLOCK_PAIRS), R + tl.arange(0, BLOCK_REST)
    first = pair * 2 if INTERLEAVED else pair
    second = first + 1 if INTERLEAVED else first + HALF
    there, kept = (head < num_heads)[:, None], (head < num_kept)[:, None]
    base, out = x_ptr + head[:, None] * stride_h, out_ptr + head[:, None] * out_stride_h
    out_dtype: tl.constexpr = out_ptr.dtype.element_ty
    stored = tl.load(base + first[None, :], mask=there & (pair < HALF)[None, :], other=0.0)
    a = stored.to(tl.float32)
    b = _load(base + second[None, :], there & (pair < HALF)[None, :])
    if D > R:
        c = _load(base + rest[None, :], there & (rest < D)[None, :])
    if HAS_NORM:
        a_weight = _load(weight_ptr + first, pair < HALF)[None, :]
        b_weight = _load(weight_ptr + second, pair < HALF)[None, :]
        squares = tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)
        if D > R:
            squares += tl.sum(c * c, axis=1)
        scale = tl.rsqrt(squares / D + eps)[:, None]
        a = ((a * scale).to(stored.dtype).to(tl.float32) * a_weight).to(stored.dtype).to(tl.float32)
        b = ((b * scale).to(stored.dtype).to(tl.float32) * b_weight).to(stored.dtype).to(tl.float32)
        if D > R:
            c = (c * scale).to(stored.dtype).to(tl.float32) * _load(weight_ptr + rest, rest < D)[
                None, :
            ]
    cos = _load(angles_ptr + pair, pair < HALF)[None, :]
    sin = _load(angles_ptr + HALF + pair, pair < HALF)[None, :]
    turned_a, turned_b = (a * cos - b * sin).to(stored.dtype), (b * cos + a * sin).to(stored.dtype)
    tl.store(out + first[None, :], turned_a.to(out_dtype), mask=kept & (pair < HALF)[None, :])
    tl.store(out + second[None, :], turned_b.to(out_dtype), mask=kept & (pair < HALF)[None, :])
    if D > R:
        tl.store(
            out + rest[None, :], c.to(stored.dtype).to(out_dtype), mask=kept & (rest < D)[None, :]
        )


@triton.jit
def rotate_in_place(
    x_ptr,
    token,
    stride_t,
    stride_h,
    weight_ptr,
    eps,
    angles_ptr,
    block,
    NUM_HEADS: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Rotate a block of heads of one token in x [T, NUM_HEADS, D]. See `rotate_heads`."""
    head = block * HEADS + tl.arange(0, HEADS)
    row = x_ptr + token * stride_t
    rotate_heads(
        row,
        stride_h,
        row,
        stride_h,
        weight_ptr,
        eps,
        angles_ptr,
        head,
        NUM_HEADS,
        NUM_HEADS,
        D,
        R,
        BLOCK_PAIRS,
        BLOCK_REST,
        INTERLEAVED,
        HAS_NORM,
    )


@triton.jit(do_not_specialize_on_alignment=["positions_ptr"])
def _rope(
    q_ptr,
    k_ptr,
    q_weight_ptr,
    k_weight_ptr,
    eps,
    positions_ptr,
    cos_sin_ptr,
    q_stride_t,
    q_stride_h,
    k_stride_t,
    k_stride_h,
    cos_sin_stride,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
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
        rotate_in_place(
            k_ptr,
            token,
            k_stride_t,
            k_stride_h,
            k_weight_ptr,
            eps,
            angles_ptr,
            block - Q_BLOCKS,
            K,
            D,
            R,
            HEADS,
            BLOCK_PAIRS,
            BLOCK_REST,
            INTERLEAVED,
            HAS_NORM,
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
        q: Tensor,
        k: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        eps: float,
        positions: Tensor,
        cos_sin: Tensor,
        interleaved: bool,
    ) -> None:
        launch(q, k, q_weight, k_weight, eps, positions, cos_sin, interleaved)

    return norm_rotate


def _launcher(problem: Problem) -> Callable[..., None]:
    num_blocks, sizes = head_blocks(problem)

    def launch(
        q: Tensor,
        k: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
        positions: Tensor,
        cos_sin: Tensor,
        interleaved: bool,
    ) -> None:
        if q.shape[0] == 0:
            return
        _rope[(q.shape[0], num_blocks)](
            q,
            k,
            q_weight,
            k_weight,
            eps,
            positions,
            cos_sin,
            q.stride(0),
            q.stride(1),
            k.stride(0),
            k.stride(1),
            cos_sin.stride(0),
            INTERLEAVED=interleaved,
            HAS_NORM=q_weight is not None,
            **sizes,
        )

    return launch


def head_blocks(problem: Problem) -> tuple[int, dict[str, int]]:
    """Return how many blocks of HEADS heads a token has, and the constants of the kernels that process them."""
    num_heads, num_kv_heads = problem["num_heads"], problem["num_kv_heads"]
    head_size, rotary_size = problem["head_size"], problem["rotary_size"]
    sizes = {
        "H": num_heads,
        "K": num_kv_heads,
        "D": head_size,
        "R": rotary_size,
        "HEADS": HEADS,
        "BLOCK_PAIRS": triton.next_power_of_2(rotary_size // 2),
        "BLOCK_REST": triton.next_power_of_2(max(1, head_size - rotary_size)),
        "num_warps": NUM_WARPS,
    }
    return triton.cdiv(num_heads, HEADS) + triton.cdiv(num_kv_heads, HEADS), sizes
