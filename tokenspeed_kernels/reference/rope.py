"""Rotary position embedding, in place, alone and behind a norm of each head."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tokenspeed_core.api import Problem
from tokenspeed_kernels.reference.norm import rms_norm

Rope = Callable[[Tensor, Tensor, Tensor, Tensor, bool], None]
NormRope = Callable[[Tensor, Tensor, Tensor, Tensor, float, Tensor, Tensor, bool], None]


def rope(problem: Problem) -> Rope:
    """Return `rope(q [T, H, D], k [T, K, D], positions [T], cos_sin [P, R], interleaved) -> None`.

    Cosines and sines are rounded to the dtype of q before they multiply, as transformers does.
    """
    rotary_size: int = problem["rotary_size"]

    def rotate(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool) -> None:
        angles = cos_sin.index_select(0, positions).to(q.dtype).unsqueeze(1)
        cos, sin = angles.chunk(2, dim=-1)
        for heads in (q, k):
            _rotate_(heads[..., :rotary_size], cos, sin, interleaved)

    return rotate


def qk_norm_rope(problem: Problem) -> NormRope:
    """Return the composition of `rms_norm` over each head of q and k and `rope`, in place."""
    norm, rotate = rms_norm({"dtype": problem["dtype"], "size": problem["head_size"]}), rope(problem)

    def norm_rotate(
        q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float,
        positions: Tensor, cos_sin: Tensor, interleaved: bool,
    ) -> None:
        q.copy_(norm(q, q_weight, eps))
        k.copy_(norm(k, k_weight, eps))
        rotate(q, k, positions, cos_sin, interleaved)

    return norm_rotate


def _rotate_(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
    """Rotate the pairs of x [T, heads, R] in place by cos, sin [T, 1, R/2]."""
    half = x.shape[-1] // 2
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    rotated = torch.addcmul(first * cos, second, sin, value=-1)
    second.mul_(cos).addcmul_(first, sin)
    first.copy_(rotated)
