"""Linear layers fused with the ops around them, composed from the other references."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tokenspeed_core.api import Problem
from tokenspeed_kernels.reference.activation import gelu_tanh_mul, silu_mul
from tokenspeed_kernels.reference.linear import linear
from tokenspeed_kernels.reference.norm import rms_norm

FusedBlock = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]
]
AddNormLinear = Callable[
    [Tensor, Tensor, Tensor, float, Tensor, Tensor | None], tuple[Tensor, Tensor]
]


def linear_silu_mul(problem: Problem) -> Callable[[Tensor, Tensor], Tensor]:
    """Return `apply(x [T, I], weight [2O, I]) -> y [T, O]`."""
    multiply, gate = linear(problem), silu_mul(problem)
    return lambda x, weight: gate(multiply(x, weight, None))


def linear_add(problem: Problem) -> Callable[[Tensor, Tensor, Tensor], None]:
    """Return `apply(x [T, I], weight [O, I], total [T, O])`, which adds to `total`."""
    multiply = linear(problem)

    def apply(x: Tensor, weight: Tensor, total: Tensor) -> None:
        total += multiply(x, weight, None)

    return apply


def add_rms_norm_linear(problem: Problem) -> AddNormLinear:
    """Return `apply(x, residual [T, I], norm_weight [I], eps, weight [O, I], bias) -> (y [T, O], x + residual)`."""
    norm, multiply = rms_norm(problem), linear(problem)

    def apply(
        x: Tensor,
        residual: Tensor,
        norm_weight: Tensor,
        eps: float,
        weight: Tensor,
        bias: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        total = x + residual
        return multiply(norm(total, norm_weight, eps), weight, bias), total

    return apply


def add_rms_norm_linear_silu_mul(problem: Problem) -> AddNormLinear:
    """Return `apply(x, residual [T, I], norm_weight [I], eps, weight [2O, I], bias) -> (y [T, O], x + residual)`."""
    return _gated(problem, silu_mul(problem))


def add_rms_norm_linear_gelu_tanh_mul(problem: Problem) -> AddNormLinear:
    """Return `apply(x, residual [T, I], norm_weight [I], eps, weight [2O, I], bias) -> (y [T, O], x + residual)`."""
    return _gated(problem, gelu_tanh_mul(problem))


def _gated(problem: Problem, gate: Callable[[Tensor], Tensor]) -> AddNormLinear:
    both = add_rms_norm_linear(problem)

    def apply(
        x: Tensor,
        residual: Tensor,
        norm_weight: Tensor,
        eps: float,
        weight: Tensor,
        bias: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        halves, total = both(x, residual, norm_weight, eps, weight, bias)
        return gate(halves), total

    return apply


def fused_block(problem: Problem) -> FusedBlock:
    """Return `apply(x, residual, out, norm, gate_up, down, next_norm, qkv, eps) -> (y [T, O], total [T, H])`."""
    inner, after = add_rms_norm_linear_silu_mul(problem), add_rms_norm_linear(problem)
    multiply = linear(problem)

    def apply(
        x: Tensor,
        residual: Tensor,
        out: Tensor,
        norm_weight: Tensor,
        gate_up: Tensor,
        down: Tensor,
        next_norm_weight: Tensor,
        qkv: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        gated, middle = inner(multiply(x, out, None), residual, norm_weight, eps, gate_up, None)
        return after(multiply(gated, down, None), middle, next_norm_weight, eps, qkv, None)

    return apply


def fused_block_in_place(problem: Problem) -> FusedBlock:
    """Return `apply(x, residual, out, norm, gate_up, down, next_norm, qkv, eps) -> (y [T, O], residual [T, H])`."""
    block = fused_block(problem)

    def apply(
        x: Tensor,
        residual: Tensor,
        out: Tensor,
        norm_weight: Tensor,
        gate_up: Tensor,
        down: Tensor,
        next_norm_weight: Tensor,
        qkv: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        y, total = block(x, residual, out, norm_weight, gate_up, down, next_norm_weight, qkv, eps)
        return y, residual.copy_(total)

    return apply
