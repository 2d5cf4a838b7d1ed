"""FP8 (e4m3) linear layers with per-token activation scales and per-channel weight scales.

A scale maps the largest magnitude of a row to 448, the largest e4m3 value. The relative error of an element is then
at most 2^-4 if its magnitude is at least 2^-14 of that maximum (Micikevicius et al., arXiv:2209.05433).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from tokenspeed_core.api import Problem
from tokenspeed_kernels.reference.activation import silu_mul
from tokenspeed_kernels.reference.norm import add_rms_norm, rms_norm

E4M3_MAX = 448.0  # largest e4m3 value
MIN_AMAX = 1e-10  # lower bound of a row's maximum, so that the scale of a zero row is not 0

Quantize = Callable[[Tensor], tuple[Tensor, Tensor]]
QuantizeStatic = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
AddNorm = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor, Tensor]]
LinearFp8 = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]
QuantizeLinear = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
AddNormLinearFp8 = Callable[
    [Tensor, Tensor, Tensor, float, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]
]
AddNormMLPFp8 = Callable[
    [Tensor, Tensor, Tensor, float, Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor | None],
    tuple[Tensor, Tensor],
]


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x [T, N] as float8_e4m3fn [T, N] and float32 scales [T, 1]."""
    wide = x.to(torch.float32)
    scale = wide.abs().amax(dim=-1, keepdim=True).clamp_(min=MIN_AMAX).div_(E4M3_MAX)
    return (wide / scale).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale


def quantize_fp8(problem: Problem) -> Quantize:
    """Return `quantize(x [T, N]) -> (y float8_e4m3fn [T, N], scale float32 [T, 1])`."""
    del problem
    return quantize_rows


def quantize_fp8_static(problem: Problem) -> QuantizeStatic:
    """Return `quantize(x [T, N], scale float32 [1]) -> (y float8_e4m3fn [T, N], scale float32 [T, 1])`."""
    del problem

    def quantize(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        codes = (x.to(torch.float32) / scale).clamp_(-E4M3_MAX, E4M3_MAX)
        return codes.to(torch.float8_e4m3fn), scale.view(1, 1).repeat(x.shape[0], 1)

    return quantize


def add_rms_norm_fp8(problem: Problem) -> AddNorm:
    """Return `norm(x [T, N], residual, weight, eps) -> (y float8_e4m3fn, scale [T, 1], residual)`."""
    norm = add_rms_norm(problem)

    def add_norm(
        x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        return *quantize_rows(norm(x, residual, weight, eps)[0]), residual

    return add_norm


def silu_mul_fp8(problem: Problem) -> Quantize:
    """Return `silu_mul(x [T, 2N]) -> (y float8_e4m3fn [T, N], scale float32 [T, 1])`."""
    plain = silu_mul(problem)
    return lambda x: quantize_rows(plain(x))


def linear_fp8(problem: Problem) -> LinearFp8:
    """Return `linear(x, x_scale, weight, weight_scale, bias) -> y [T, O]`; each call widens both to float32."""
    dtype: torch.dtype = getattr(torch, problem["dtype"])

    def linear(
        x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None
    ) -> Tensor:
        y = functional.linear(x.to(torch.float32), weight.to(torch.float32))
        y = y.mul_(x_scale).mul_(weight_scale.view(1, -1))
        return (y if bias is None else y.add_(bias)).to(dtype)

    return linear


def quantize_linear_fp8(problem: Problem) -> QuantizeLinear:
    """Return `apply(x [T, I], weight [O, I], weight_scale [O, 1], bias) -> y [T, O]`."""
    multiply = linear_fp8(problem)
    return lambda x, weight, weight_scale, bias: multiply(
        *quantize_rows(x), weight, weight_scale, bias
    )


def add_rms_norm_linear_fp8(problem: Problem) -> AddNormLinearFp8:
    """Return `apply(x, residual [T, I], norm_weight, eps, weight [O, I], weight_scale, bias) -> (y, x + residual)`."""
    norm, multiply = rms_norm(problem), quantize_linear_fp8(problem)

    def apply(
        x: Tensor,
        residual: Tensor,
        norm_weight: Tensor,
        eps: float,
        weight: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        total = x + residual
        return multiply(norm(total, norm_weight, eps), weight, weight_scale, bias), total

    return apply


def add_rms_norm_mlp_fp8(problem: Problem) -> AddNormMLPFp8:
    """Return `apply(x, residual [T, N], norm_weight, eps, gate_up, …, down, …) -> (y [T, N], x + residual)`."""
    gate_up_linear = add_rms_norm_linear_fp8(problem)
    activation = silu_mul(problem)
    down_linear = quantize_linear_fp8(problem)

    def apply(
        x: Tensor,
        residual: Tensor,
        norm_weight: Tensor,
        eps: float,
        gate_up: Tensor,
        gate_up_scale: Tensor,
        gate_up_bias: Tensor | None,
        down: Tensor,
        down_scale: Tensor,
        down_bias: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        halves, total = gate_up_linear(
            x, residual, norm_weight, eps, gate_up, gate_up_scale, gate_up_bias
        )
        return down_linear(activation(halves), down, down_scale, down_bias), total

    return apply
