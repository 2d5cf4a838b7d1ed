"""Experts with biases and a clamped SwiGLU, with unquantized or MXFP4 weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from tokenspeed_core.api import Problem
from tokenspeed_kernels.reference.moe import with_tokens
from tokenspeed_kernels.reference.w4a16 import e2m1

GROUP = 32  # MXFP4 values that share a scale

Experts = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
ExpertsMxfp4 = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor
]


def moe_biased_experts(problem: Problem) -> Experts:
    """Return `experts(x, gate_up, gate_up_bias, down, down_bias, weights, ids) -> y [T, N]`.

    Runs each expert on its tokens. On CUDA this synchronizes with the device to find the experts that have tokens.
    """
    run = _runner(problem)

    def experts(
        x: Tensor,
        gate_up: Tensor,
        gate_up_bias: Tensor,
        down: Tensor,
        down_bias: Tensor,
        weights: Tensor,
        ids: Tensor,
    ) -> Tensor:
        return run(x, gate_up.__getitem__, gate_up_bias, down.__getitem__, down_bias, weights, ids)

    return experts


def moe_biased_experts_mxfp4(problem: Problem) -> ExpertsMxfp4:
    """Return `experts(x, gate_up, gate_up_scale, gate_up_bias, down, down_scale, down_bias, weights, ids) -> y [T, N]`.

    Like `moe_biased_experts` it synchronizes with the device. Each call dequantizes the weights of its experts.
    """
    run = _runner(problem)

    def experts(
        x: Tensor,
        gate_up: Tensor,
        gate_up_scale: Tensor,
        gate_up_bias: Tensor,
        down: Tensor,
        down_scale: Tensor,
        down_bias: Tensor,
        weights: Tensor,
        ids: Tensor,
    ) -> Tensor:
        return run(
            x,
            lambda expert: dequantize_mxfp4(gate_up[expert], gate_up_scale[expert]).to(x.dtype),
            gate_up_bias,
            lambda expert: dequantize_mxfp4(down[expert], down_scale[expert]).to(x.dtype),
            down_bias,
            weights,
            ids,
        )

    return experts


def dequantize_mxfp4(codes: Tensor, scale: Tensor) -> Tensor:
    """Return the values, float32 [..., N], of codes uint8 [..., N / 2] with scales uint8 [..., N / 32].

    Source: OCP Microscaling Formats (MX) Specification, version 1.0.
    """
    pairs = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    groups = e2m1(pairs).view(*scale.shape, GROUP)
    return torch.ldexp(groups, scale.unsqueeze(-1).int() - 127).flatten(-2)


def _runner(problem: Problem) -> Callable[..., Tensor]:
    """Return a function that runs each expert on its tokens. It takes functions from an expert to its weights."""
    alpha, limit = problem["alpha"], problem["limit"]

    def run(
        x: Tensor,
        gate_up: Callable[[int], Tensor],
        gate_up_bias: Tensor,
        down: Callable[[int], Tensor],
        down_bias: Tensor,
        weights: Tensor,
        ids: Tensor,
    ) -> Tensor:
        y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert, tokens, weight in with_tokens(ids, weights, len(down_bias)):
            both = functional.linear(x[tokens], gate_up(expert), gate_up_bias[expert])
            gate, up = both[:, ::2].clamp(max=limit), both[:, 1::2].clamp(-limit, limit)
            hidden = (up + 1) * gate * torch.sigmoid(alpha * gate)
            hidden = functional.linear(hidden, down(expert), down_bias[expert])
            y.index_add_(0, tokens, hidden.to(torch.float32) * weight)
        return y.to(x.dtype)

    return run
