"""Input generators for the block-scaled linear ops."""

from __future__ import annotations

from typing import Any

import torch
from tokenspeed_testing.inputs import random, random_rows
from torch import Generator, Tensor, device

from tokenspeed_core.api import Problem
from tokenspeed_kernels_blackwell.linear.reference import mxfp8_rows, nvfp4_rows

NVFP4_MAX = 448.0 * 6.0


def quantize_mxfp8(
    problem: Problem, num: int, at: device, seed: Generator, strided: bool
) -> dict[str, Any]:
    """Make x [T, N] with row magnitudes over three decades; every third row is zero."""
    size = torch.logspace(-2, 1, max(num, 1))[:num] * (torch.arange(num) % 3 != 2)
    x = random_rows(num, problem["size"], problem, at, seed, strided)
    return {"x": x.mul_(size.unsqueeze(1).to(x))}


def quantize_nvfp4(
    problem: Problem, num: int, at: device, seed: Generator, strided: bool
) -> dict[str, Any]:
    """Like `quantize_mxfp8`, with the per-tensor scale."""
    given = quantize_mxfp8(problem, num, at, seed, strided)
    return {**given, "scale": _scale(given["x"])}


def linear_mxfp8(
    problem: Problem, num: int, at: device, seed: Generator, strided: bool
) -> dict[str, Any]:
    """Make x [T, I] and weight [O, I] of unit gain, both quantized, and a bias [O] for even T."""
    x, weight, bias = _operands(problem, num, at, seed)
    (x, x_scale), (weight, weight_scale) = mxfp8_rows(x), mxfp8_rows(weight)
    if strided:
        x, x_scale = _within_wider_rows(x), _within_wider_rows(x_scale)
    return {
        "x": x,
        "x_scale": x_scale,
        "weight": weight,
        "weight_scale": weight_scale,
        "bias": bias,
    }


def linear_nvfp4(
    problem: Problem, num: int, at: device, seed: Generator, strided: bool
) -> dict[str, Any]:
    """Like `linear_mxfp8`, with the product of both per-tensor scales."""
    x, weight, bias = _operands(problem, num, at, seed)
    scales = _scale(x), _scale(weight)
    (x, x_scale), (weight, weight_scale) = nvfp4_rows(x, scales[0]), nvfp4_rows(weight, scales[1])
    if strided:
        x, x_scale = _within_wider_rows(x), _within_wider_rows(x_scale)
    return {
        "x": x,
        "x_scale": x_scale,
        "weight": weight,
        "weight_scale": weight_scale,
        "scale": scales[0] * scales[1],
        "bias": bias,
    }


def _operands(
    problem: Problem, num: int, at: device, seed: Generator
) -> tuple[Tensor, Tensor, Tensor | None]:
    inner, outer = problem["in_size"], problem["out_size"]
    x = random((num, inner), problem, at, seed)
    x *= torch.logspace(-2, 1, inner, device=at).to(x)  # scales differ along a row
    weight = random((outer, inner), problem, at, seed) / inner**0.5
    return x, weight, random((outer,), problem, at, seed) if num % 2 == 0 else None


def _scale(x: Tensor) -> Tensor:
    largest = x.float().abs().amax() if x.numel() else torch.ones((), device=x.device)
    return (largest / NVFP4_MAX).reshape(1)


def _within_wider_rows(x: Tensor) -> Tensor:
    wide = torch.zeros((x.shape[0], x.shape[1] + 48), dtype=x.dtype, device=x.device)
    cut = wide[:, 16 : 16 + x.shape[1]]
    return cut.copy_(x)
