"""Experts with 4-bit integer weights and unquantized activations, in the layout of `w4a16`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from tokenspeed_core.api import Problem
from tokenspeed_kernels.reference.moe import with_tokens
from tokenspeed_kernels.reference.w4a16 import dequantize_int4

Optional = Tensor | None
ExpertsW4A16 = Callable[
    [
        Tensor,
        Tensor,
        Tensor,
        Optional,
        Optional,
        Tensor,
        Tensor,
        Optional,
        Optional,
        Tensor,
        Tensor,
    ],
    Tensor,
]


def moe_experts_w4a16(problem: Problem) -> ExpertsW4A16:
    """Return `experts(x, *gate_up, *down, weights, ids) -> y [T, N]`; each call dequantizes the weights it needs.

    gate_up and down are a weight, scales, zero points or None, and an order of columns or None. On CUDA this
    synchronizes with the device.
    """
    inner: int = problem["intermediate_size"]

    def experts(
        x: Tensor,
        gate_up: Tensor,
        gate_up_scale: Tensor,
        gate_up_zero: Tensor | None,
        gate_up_order: Tensor | None,
        down: Tensor,
        down_scale: Tensor,
        down_zero: Tensor | None,
        down_order: Tensor | None,
        weights: Tensor,
        ids: Tensor,
    ) -> Tensor:
        y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert, tokens, weight in with_tokens(ids, weights, len(down)):
            first = _of(expert, gate_up, gate_up_scale, gate_up_zero, gate_up_order)
            both = functional.linear(x[tokens].to(torch.float32), first)
            hidden = (functional.silu(both[:, :inner]) * both[:, inner:]).to(x.dtype)
            second = _of(expert, down, down_scale, down_zero, down_order)
            y.index_add_(0, tokens, functional.linear(hidden.to(torch.float32), second) * weight)
        return y.to(x.dtype)

    return experts


def _of(
    expert: int, weight: Tensor, scale: Tensor, zero: Tensor | None, order: Tensor | None
) -> Tensor:
    """Return the values of an expert's weight, float32, with its columns in the order of x."""
    values = dequantize_int4(weight[expert], scale[expert], None if zero is None else zero[expert])
    if order is None:
        return values
    return torch.empty_like(values).index_copy_(1, order[expert].long(), values)
