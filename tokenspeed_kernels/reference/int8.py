"""INT8 linear layers (W8A8): per-channel weight scales, per-token or per-tensor activation scales, all symmetric."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from tokenspeed_core.api import Problem
from tokenspeed_kernels.reference.fp8 import MIN_AMAX, Quantize, QuantizeStatic

INT8_MAX = 127.0  # dynamic scales map the largest magnitude to it; only static ones use -128

LinearInt8 = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x [T, N] as int8 [T, N] and float32 scales [T, 1]."""
    wide = x.to(torch.float32)
    scale = wide.abs().amax(dim=-1, keepdim=True).clamp_(min=MIN_AMAX).div_(INT8_MAX)
    return (wide / scale).round_().to(torch.int8), scale


def quantize_int8(problem: Problem) -> Quantize:
    """Return `quantize(x [T, N]) -> (y int8 [T, N], scale float32 [T, 1])`."""
    del problem
    return quantize_rows


def quantize_int8_static(problem: Problem) -> QuantizeStatic:
    """Return `quantize(x [T, N], scale float32 [1]) -> (y int8 [T, N], scale float32 [T, 1])`."""
    del problem

    def quantize(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        codes = (x.to(torch.float32) / scale).round_().clamp_(-INT8_MAX - 1, INT8_MAX)
        return codes.to(torch.int8), scale.view(1, 1).repeat(x.shape[0], 1)

    return quantize


def linear_int8(problem: Problem) -> LinearInt8:
    """Return `linear(x, x_scale, weight, weight_scale, bias) -> y [T, O]`. Sums of products are exact integers."""
    dtype: torch.dtype = getattr(torch, problem["dtype"])

    def linear(
        x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None
    ) -> Tensor:
        # float64 represents the sums exactly; torch has no integer GEMM for every device and shape.
        y = functional.linear(x.to(torch.float64), weight.to(torch.float64)).to(torch.float32)
        y = y.mul_(x_scale).mul_(weight_scale.view(1, -1))
        return (y if bias is None else y.add_(bias)).to(dtype)

    return linear
