"""RMS norm (arXiv:1910.07467): normalize in float32, round to the dtype, then multiply by the weight."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tokenspeed_core.api import Problem


def rms_norm(problem: Problem) -> Callable[[Tensor, Tensor, float], Tensor]:
    """Return `norm(x [..., N], weight [N], eps) -> y` for the problem's dtype.

    For float32 it calls torch.rms_norm, which rounds in the same way.
    """
    return _norm_float32 if problem["dtype"] == "float32" else _norm_rounded


def add_rms_norm(
    problem: Problem,
) -> Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]:
    """Return `norm(x [T, N], residual, weight, eps) -> (y, residual)`, which adds x into `residual`."""
    norm = rms_norm(problem)

    def add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        residual.add_(x)
        return norm(residual, weight, eps), residual

    return add_norm


def normalize(x: Tensor, eps: float) -> Tensor:
    """Return x normalized over its last axis in float32 and rounded to its dtype, without a weight."""
    return torch.rms_norm(x.to(torch.float32), x.shape[-1:], None, eps).to(x.dtype)


def _norm_float32(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.rms_norm(x, weight.shape, weight, eps)


def _norm_rounded(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return normalize(x, eps).mul_(weight)
