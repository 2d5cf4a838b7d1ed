"""Rotary position embedding (RoPE, arXiv:2104.09864) in place, alone or after an RMS norm of each head."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tokenspeed_core.api import Problem
from tokenspeed_kernels.reference.norm import normalize, rms_norm

Rope = Callable[[Tensor, Tensor, Tensor, Tensor, bool], None]
NormRope = Callable[[Tensor, Tensor, Tensor, Tensor, float, Tensor, Tensor, bool], None]


def rope(problem: Problem) -> Rope:
    """Return `rope(q [T, H, D], k [T, K, D], positions [T], cos_sin [P, R], interleaved) -> None`.

    Cosines and sines are rounded to the dtype of q before the multiplication, as in transformers. Raises ValueError
    for a rotary size that is odd or larger than the head size.
    """
    rotary_size = _rotary_size(problem)

    def rotate(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool) -> None:
        cos, sin = _angles(positions, cos_sin, q.dtype)
        joined = _joined(q, k)
        for heads in (q, k) if joined is None else (joined,):
            turned = heads[..., :rotary_size]
            _rotate(turned.clone(), turned, cos, sin, interleaved)

    return rotate


def qk_norm_rope(problem: Problem) -> NormRope:
    """Return the composition of `rms_norm` over each head of q and k and `rope`, in place.

    If q and k are adjacent in memory, as a QKV projection returns them, they are processed as one tensor. Raises
    ValueError as `rope` does.
    """
    norm = rms_norm({"dtype": problem["dtype"], "size": problem["head_size"]})
    num_heads: int = problem["num_heads"]
    head_size: int = problem["head_size"]
    rotary_size = _rotary_size(problem)

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
        cos, sin = _angles(positions, cos_sin, q.dtype)
        joined = _joined(q, k)
        if joined is None:
            pairs = [(q, norm(q, q_weight, eps)), (k, norm(k, k_weight, eps))]
        else:
            normed = normalize(joined, eps)
            normed[:, :num_heads].mul_(q_weight)
            normed[:, num_heads:].mul_(k_weight)
            pairs = [(joined, normed)]
        for heads, normed in pairs:
            if rotary_size < head_size:
                heads[..., rotary_size:] = normed[..., rotary_size:]
                heads, normed = heads[..., :rotary_size], normed[..., :rotary_size]
            _rotate(normed, heads, cos, sin, interleaved)

    return norm_rotate


def _rotary_size(problem: Problem) -> int:
    rotary_size: int = problem["rotary_size"]
    if rotary_size % 2 or rotary_size > problem["head_size"]:
        raise ValueError(
            f"rotary_size is {rotary_size}, expected an even number up to head_size ({problem['head_size']})"
        )
    return rotary_size


def _angles(positions: Tensor, cos_sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [T, 1, R/2] of the positions."""
    cos, sin = cos_sin.index_select(0, positions).to(dtype).unsqueeze(1).chunk(2, dim=-1)
    return cos, sin


def _joined(q: Tensor, k: Tensor) -> Tensor | None:
    """Return q and k as one view [T, H + K, D] if k's heads follow q's in memory, else None."""
    strides = q.stride()
    follows = k.data_ptr() == q.data_ptr() + q.shape[1] * strides[1] * q.element_size()
    if (
        not follows
        or k.stride() != strides
        or q.untyped_storage().data_ptr() != k.untyped_storage().data_ptr()
    ):
        return None
    return q.as_strided((q.shape[0], q.shape[1] + k.shape[1], q.shape[2]), strides)


def _rotate(x: Tensor, out: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
    """Rotate the pairs of x [T, heads, R] by cos, sin [T, 1, R/2] into `out`, which must not overlap x."""
    if interleaved:
        first, second, a, b = x[..., 0::2], x[..., 1::2], out[..., 0::2], out[..., 1::2]
    else:
        (first, second), (a, b) = x.chunk(2, dim=-1), out.chunk(2, dim=-1)
    torch.mul(first, cos, out=a)
    a.addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=b)
    b.addcmul_(first, sin)
