"""The gated activation of SwiGLU."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

from tokenspeed_core.api import Problem


def silu_mul(problem: Problem) -> Callable[[Tensor], Tensor]:
    """Return `silu_mul(x [T, 2N]) -> y [T, N]`: silu of the first half (rounded) times the second."""
    size: int = problem["size"]

    def silu_mul_halves(x: Tensor) -> Tensor:
        return functional.silu(x[..., :size]).mul_(x[..., size:])

    return silu_mul_halves
