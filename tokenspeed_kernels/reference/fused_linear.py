"""Linear maps behind the addition and norm that precede them in a layer: compositions of the other references."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tokenspeed_core.api import Problem
from tokenspeed_kernels.reference.activation import silu_mul
from tokenspeed_kernels.reference.linear import linear
from tokenspeed_kernels.reference.norm import rms_norm

AddNormLinear = Callable[[Tensor, Tensor, Tensor, float, Tensor, Tensor | None], tuple[Tensor, Tensor]]


def add_rms_norm_linear(problem: Problem) -> AddNormLinear:
    """Return `apply(x, residual [T, I], norm_weight [I], eps, weight [O, I], bias) -> (y [T, O], x + residual)`."""
    norm, product = rms_norm(problem), linear(problem)

    def apply(
        x: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        total = x + residual
        return product(norm(total, norm_weight, eps), weight, bias), total

    return apply


def add_rms_norm_linear_silu_mul(problem: Problem) -> AddNormLinear:
    """Return `apply(x, residual [T, I], norm_weight [I], eps, weight [2O, I], bias) -> (y [T, O], x + residual)`."""
    both, gate = add_rms_norm_linear(problem), silu_mul(problem)

    def apply(
        x: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        halves, total = both(x, residual, norm_weight, eps, weight, bias)
        return gate(halves), total

    return apply
