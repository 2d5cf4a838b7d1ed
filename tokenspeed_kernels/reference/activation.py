"""Gated activations: silu(gate) * up (SwiGLU) and gelu(gate) * up (GeGLU, the tanh approximation), arXiv:2002.05202."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

from tokenspeed_core.api import Problem


def silu_mul(problem: Problem) -> Callable[[Tensor], Tensor]:
    """Return `silu_mul(x [T, 2N]) -> y [T, N]`: silu of the first half, rounded to the dtype, times the second half."""
    del problem

    def silu_mul_halves(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)

    return silu_mul_halves


def gelu_tanh_mul(problem: Problem) -> Callable[[Tensor], Tensor]:
    """Return `gelu_tanh_mul(x [T, 2N]) -> y [T, N]`: gelu of the first half, rounded to the dtype, times the second."""
    del problem

    def gelu_tanh_mul_halves(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return functional.gelu(gate, approximate="tanh").mul_(up)

    return gelu_tanh_mul_halves
