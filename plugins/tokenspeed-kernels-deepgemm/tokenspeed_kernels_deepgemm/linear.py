"""Products of e4m3 operands with a scale a block by DeepGEMM (Zhao et al. 2025)."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor

from tokenspeed_core.api import Problem

LIBRARY = "deep_gemm"  # what DeepSeek's own build and the distribution sgl-deep-gemm are imported as

Linear = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]


def linear_fp8_block(problem: Problem) -> Linear:
    """Return `linear(x, x_scale, weight, weight_scale, bias) -> y [T, O]`. Raises ImportError without the library."""
    multiply = import_module(LIBRARY).fp8_gemm_nt
    dtype: torch.dtype = getattr(torch, problem["dtype"])

    def linear(x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
        y = torch.empty((x.shape[0], weight.shape[0]), dtype=dtype, device=x.device)
        if x.shape[0]:
            operands = (x.contiguous(), x_scale.contiguous()), (weight, weight_scale)
            multiply(*operands, y, disable_ue8m0_cast=True)  # scales are any float32, not powers of two
        return y if bias is None else y.add_(bias)

    return linear
