"""Input generators for the block-scaled mixture of experts ops."""

from __future__ import annotations

from typing import Any

import torch
from tokenspeed_testing.inputs import random, random_rows
from torch import Generator, Tensor, device

from tokenspeed_core.api import Problem
from tokenspeed_kernels_blackwell.linear.inputs import NVFP4_MAX
from tokenspeed_kernels_blackwell.linear.reference import mxfp8_rows, nvfp4_rows


def moe_experts_mxfp8(
    problem: Problem, num: int, at: device, seed: Generator, strided: bool
) -> dict[str, Any]:
    """Make x [T, N], quantized weights of unit gain, and distinct experts per token; some experts get no token."""
    gate_up, down = _weights(problem, at, seed)
    (gate_up, gate_up_scale), (down, down_scale) = mxfp8_rows(gate_up), mxfp8_rows(down)
    return {
        "x": random_rows(num, problem["hidden_size"], problem, at, seed, strided),
        "gate_up": gate_up,
        "gate_up_scale": gate_up_scale,
        "down": down,
        "down_scale": down_scale,
        **_routing(problem, num, at, seed),
    }


def moe_experts_nvfp4(
    problem: Problem, num: int, at: device, seed: Generator, strided: bool
) -> dict[str, Any]:
    """Like `moe_experts_mxfp8`, with per-tensor scales that differ by expert."""
    gate_up, down = _weights(problem, at, seed)
    gate_up, gate_up_scale, gate_up_factor = _each_nvfp4(gate_up)
    down, down_scale, down_factor = _each_nvfp4(down)
    x = random_rows(num, problem["hidden_size"], problem, at, seed, strided)
    return {
        "x": x,
        "x_scale": torch.full((1,), 6.0 / NVFP4_MAX, device=at),
        "gate_up": gate_up,
        "gate_up_scale": gate_up_scale,
        "gate_up_factor": gate_up_factor,
        "hidden_scale": torch.full((1,), 12.0 / NVFP4_MAX, device=at),
        "down": down,
        "down_scale": down_scale,
        "down_factor": down_factor,
        **_routing(problem, num, at, seed),
    }


def _weights(problem: Problem, at: device, seed: Generator) -> tuple[Tensor, Tensor]:
    """Make gate_up [E, 2I, N] and down [E, N, I] with magnitudes that differ by expert and row."""
    experts, size, inner = (
        problem["num_experts"],
        problem["hidden_size"],
        problem["intermediate_size"],
    )
    gain = torch.linspace(0.7, 1.3, experts, device=at).view(-1, 1, 1)
    gate_up = random((experts, 2 * inner, size), problem, at, seed).float() / size**0.5 * gain
    down = random((experts, size, inner), problem, at, seed).float() / inner**0.5 * gain
    for weight in (gate_up, down):
        weight[:, ::5] *= 0.25
    return gate_up, down


def _routing(problem: Problem, num: int, at: device, seed: Generator) -> dict[str, Tensor]:
    experts, k = problem["num_experts"], problem["top_k"]
    ids = torch.rand((num, experts), generator=seed).argsort(dim=1)[:, :k].to(torch.int32)
    ids[2::5, -1] = experts
    ids[4::5] = experts
    return {"weights": torch.rand((num, k), generator=seed).to(at), "ids": ids.to(at)}


def _each_nvfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, group scales and per-tensor scales, stacked over experts."""
    factors = weight.abs().amax(dim=(1, 2)) / NVFP4_MAX
    quantized = [
        nvfp4_rows(each, factor.view(1)) for each, factor in zip(weight, factors, strict=True)
    ]
    codes, scales = zip(*quantized, strict=True)
    return torch.stack(codes), torch.stack(scales), factors
