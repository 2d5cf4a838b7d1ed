"""Linear layers fused with the residual add and RMS norm before them, or with a gate, for any number of rows.

They compose torch's GEMM with the Triton kernels for norm and activation. For many rows, gate and up projection and
activation are one kernel (`gated_gemm`).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

from tokenspeed_core.api import Problem
from tokenspeed_kernels.reference.fused_linear import AddNormLinear
from tokenspeed_kernels.triton.activation.gated import gelu_tanh_mul, silu_mul
from tokenspeed_kernels.triton.linear.gated_gemm import MIN_ROWS, can_gate, gated_linear
from tokenspeed_kernels.triton.norm.rms_norm import sum_rms_norm


def linear_silu_mul(problem: Problem) -> Callable[[Tensor, Tensor], Tensor]:
    """Return `apply(x [T, I], weight [2O, I]) -> y [T, O]`."""
    gate = silu_mul({"size": problem["out_size"], "dtype": problem["dtype"]})
    gated_gemm = gated_linear(problem) if can_gate(problem) else None

    def apply(x: Tensor, weight: Tensor) -> Tensor:
        if gated_gemm is not None and x.shape[0] >= MIN_ROWS:
            return gated_gemm(x, weight)
        return gate(functional.linear(x, weight))

    return apply


def linear_add(problem: Problem) -> Callable[[Tensor, Tensor, Tensor], None]:
    """Return `apply(x [T, I], weight [O, I], total [T, O])`, which adds to `total` in torch's GEMM."""
    del problem

    def apply(x: Tensor, weight: Tensor, total: Tensor) -> None:
        total.addmm_(x, weight.t())

    return apply


def add_rms_norm_linear(problem: Problem) -> AddNormLinear:
    """Return `apply(x, residual [T, I], norm_weight [I], eps, weight [O, I], bias) -> (y [T, O], x + residual)`."""
    norm = sum_rms_norm({"size": problem["in_size"], "dtype": problem["dtype"]})

    def apply(
        x: Tensor,
        residual: Tensor,
        norm_weight: Tensor,
        eps: float,
        weight: Tensor,
        bias: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        normed, total = norm(x, residual, norm_weight, eps)
        return functional.linear(normed, weight, bias), total

    return apply


def add_rms_norm_linear_silu_mul(problem: Problem) -> AddNormLinear:
    """Return `apply(x, residual [T, I], norm_weight [I], eps, weight [2O, I], bias) -> (y [T, O], x + residual)`."""
    return _gated(problem, is_gelu=False)


def add_rms_norm_linear_gelu_tanh_mul(problem: Problem) -> AddNormLinear:
    """Return `apply(x, residual [T, I], norm_weight [I], eps, weight [2O, I], bias) -> (y [T, O], x + residual)`."""
    return _gated(problem, is_gelu=True)


def _gated(problem: Problem, *, is_gelu: bool) -> AddNormLinear:
    norm = sum_rms_norm({"size": problem["in_size"], "dtype": problem["dtype"]})
    make_gate = gelu_tanh_mul if is_gelu else silu_mul
    gate = make_gate({"size": problem["out_size"], "dtype": problem["dtype"]})
    gated_gemm = gated_linear(problem, is_gelu=is_gelu) if can_gate(problem) else None

    def apply(
        x: Tensor,
        residual: Tensor,
        norm_weight: Tensor,
        eps: float,
        weight: Tensor,
        bias: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        normed, total = norm(x, residual, norm_weight, eps)
        if gated_gemm is not None and bias is None and x.shape[0] >= MIN_ROWS:
            return gated_gemm(normed, weight), total
        return gate(functional.linear(normed, weight, bias)), total

    return apply
