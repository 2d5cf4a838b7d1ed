"""Experts with 4-bit weights, integers or E2M1 floats, and unquantized activations, in the layout of `w4a16`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from tokenspeed_core.api import Problem
from tokenspeed_kernels.reference.moe import with_tokens
from tokenspeed_kernels.reference.w4a16 import dequantize_e2m1, dequantize_int4

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
ExpertsMxfp4 = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def moe_experts_w4a16(problem: Problem) -> ExpertsW4A16:
    """Return `experts(x, *gate_up, *down, weights, ids) -> y [T, N]`; each call dequantizes the weights it needs.

    gate_up and down are a weight, scales, zero points or None, and an order of columns or None. On CUDA this
    synchronizes with the device.
    """
    run = _runner(problem)

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
        return run(
            x,
            lambda expert: _of(expert, gate_up, gate_up_scale, gate_up_zero, gate_up_order),
            lambda expert: _of(expert, down, down_scale, down_zero, down_order),
            len(down),
            weights,
            ids,
        )

    return experts


def moe_experts_mxfp4(problem: Problem) -> ExpertsMxfp4:
    """Return `experts(x, gate_up, gate_up_scale, down, down_scale, weights, ids) -> y [T, N]`.

    Like `moe_experts_w4a16` it synchronizes with the device. Each call dequantizes the weights it needs.
    """
    run = _runner(problem)

    def experts(
        x: Tensor,
        gate_up: Tensor,
        gate_up_scale: Tensor,
        down: Tensor,
        down_scale: Tensor,
        weights: Tensor,
        ids: Tensor,
    ) -> Tensor:
        return run(
            x,
            lambda expert: dequantize_e2m1(gate_up[expert], gate_up_scale[expert]),
            lambda expert: dequantize_e2m1(down[expert], down_scale[expert]),
            len(down),
            weights,
            ids,
        )

    return experts


def _runner(problem: Problem) -> Callable[..., Tensor]:
    """Return a function that runs each expert on its tokens. It takes functions from an expert to its values, float32."""
    inner: int = problem["intermediate_size"]

    def run(
        x: Tensor,
        gate_up: Callable[[int], Tensor],
        down: Callable[[int], Tensor],
        num_experts: int,
        weights: Tensor,
        ids: Tensor,
    ) -> Tensor:
        y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert, tokens, weight in with_tokens(ids, weights, num_experts):
            both = functional.linear(x[tokens].to(torch.float32), gate_up(expert))
            hidden = (functional.silu(both[:, :inner]) * both[:, inner:]).to(x.dtype)
            result = functional.linear(hidden.to(torch.float32), down(expert))
            y.index_add_(0, tokens, result * weight)
        return y.to(x.dtype)

    return run


def _of(
    expert: int, weight: Tensor, scale: Tensor, zero: Tensor | None, order: Tensor | None
) -> Tensor:
    """Return the values of an expert's weight, float32, with its columns in the order of x."""
    values = dequantize_int4(weight[expert], scale[expert], None if zero is None else zero[expert])
    if order is None:
        return values
    return torch.empty_like(values).index_copy_(1, order[expert].long(), values)
