"""Experts with 8-bit weights and activations: FP8 or INT8, with per-token, static or block-wise scales.

On CUDA they synchronize with the device to find the experts that have tokens. Each call converts the weights of its
experts to a wider type.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from tokenspeed_core.api import Problem
from tokenspeed_kernels.reference import fp8, int8
from tokenspeed_kernels.reference.fp8 import linear_fp8
from tokenspeed_kernels.reference.fp8_block import BLOCK, linear_fp8_block, quantize_groups
from tokenspeed_kernels.reference.int8 import linear_int8
from tokenspeed_kernels.reference.moe import with_tokens

Experts = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
ExpertsStatic = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor
]
Quantize = Callable[[Tensor], tuple[Tensor, Tensor]]
Multiply = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]
WIDE = {"dtype": "float32"}


def moe_experts_fp8(problem: Problem) -> Experts:
    """Return `experts(x, gate_up, gate_up_scale, down, down_scale, weights, ids) -> y [T, N]`."""
    return _dynamic(problem, fp8.quantize_rows, linear_fp8(WIDE))


def moe_experts_int8(problem: Problem) -> Experts:
    """Return `experts(x, gate_up, gate_up_scale, down, down_scale, weights, ids) -> y [T, N]`."""
    return _dynamic(problem, int8.quantize_rows, linear_int8(WIDE))


def moe_experts_fp8_block(problem: Problem) -> Experts:
    """Return `experts(x, gate_up, gate_up_scale, down, down_scale, weights, ids) -> y [T, N]`, with block-wise scales.

    Raises ValueError if gate and up share a block.
    """
    inner: int = problem["intermediate_size"]
    if inner % BLOCK:
        raise ValueError(f"the intermediate size {inner} is not a multiple of {BLOCK}")
    return _dynamic(problem, quantize_groups, linear_fp8_block(WIDE))


def moe_experts_fp8_static(problem: Problem) -> ExpertsStatic:
    """Return `experts(x, gate_up_input, gate_up, …scale, down_input, down, …scale, weights, ids) -> y [T, N]`."""
    return _static(problem, fp8.quantize_fp8_static(problem), linear_fp8(WIDE))


def moe_experts_int8_static(problem: Problem) -> ExpertsStatic:
    """Return `experts(x, gate_up_input, gate_up, …scale, down_input, down, …scale, weights, ids) -> y [T, N]`."""
    return _static(problem, int8.quantize_int8_static(problem), linear_int8(WIDE))


def _dynamic(problem: Problem, quantize: Quantize, multiply: Multiply) -> Experts:
    """Return the experts for activations with dynamic scales."""

    def experts(
        x: Tensor,
        gate_up: Tensor,
        gate_up_scale: Tensor,
        down: Tensor,
        down_scale: Tensor,
        weights: Tensor,
        ids: Tensor,
    ) -> Tensor:
        return _run(
            problem,
            multiply,
            (x, weights, ids),
            (gate_up, gate_up_scale, quantize),
            (down, down_scale, quantize),
        )

    return experts


def _static(problem: Problem, quantize: fp8.QuantizeStatic, multiply: Multiply) -> ExpertsStatic:
    """Return the experts for activations with static scales."""

    def experts(
        x: Tensor,
        gate_up_input: Tensor,
        gate_up: Tensor,
        gate_up_scale: Tensor,
        down_input: Tensor,
        down: Tensor,
        down_scale: Tensor,
        weights: Tensor,
        ids: Tensor,
    ) -> Tensor:
        return _run(
            problem,
            multiply,
            (x, weights, ids),
            (gate_up, gate_up_scale, lambda rows: quantize(rows, gate_up_input)),
            (down, down_scale, lambda rows: quantize(rows, down_input)),
        )

    return experts


def _run(
    problem: Problem,
    multiply: Multiply,
    routed: tuple[Tensor, Tensor, Tensor],
    gate_up: tuple[Tensor, Tensor, Quantize],
    down: tuple[Tensor, Tensor, Quantize],
) -> Tensor:
    """Run each expert on its tokens. A weight comes with its scales and the quantization of its inputs."""
    x, weights, ids = routed
    inner: int = problem["intermediate_size"]
    y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    codes, scale = gate_up[2](x)
    for expert, tokens, weight in with_tokens(ids, weights, len(down[0])):
        both = multiply(codes[tokens], scale[tokens], gate_up[0][expert], gate_up[1][expert], None)
        hidden = (functional.silu(both[:, :inner]) * both[:, inner:]).to(x.dtype)
        narrow = multiply(*down[2](hidden), down[0][expert], down[1][expert], None)
        y.index_add_(0, tokens, narrow * weight)
    return y.to(x.dtype)
