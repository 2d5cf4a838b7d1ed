"""Inputs for the ops of `contracts`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor, device

from tokenspeed_core.api import Problem
from tokenspeed_core.testing.inputs import random, random_rows
from tokenspeed_kernels_deepgemm.reference import quantize_blocks, quantize_groups


def quantize_fp8_groups(problem: Problem, num: int, at: device, seed: Generator, strided: bool) -> dict[str, Any]:
    """Make x [T, N] whose rows differ in size a thousandfold, every third of them zero."""
    size = torch.logspace(-2, 1, max(num, 1))[:num] * (torch.arange(num) % 3 != 2)
    x = random_rows(num, problem["size"], problem, at, seed, strided)
    return {"x": x.mul_(size.unsqueeze(1).to(x))}


def linear_fp8_block(problem: Problem, num: int, at: device, seed: Generator, strided: bool) -> dict[str, Any]:
    """Make x [T, I] and a weight [O, I] of unit gain, both growing along a row, and a bias [O] for even T."""
    inner, outer = problem["in_size"], problem["out_size"]
    grows = torch.logspace(-1, 0.5, inner, device=at)
    x, x_scale = quantize_groups(random((num, inner), problem, at, seed) * grows)
    rows = torch.logspace(-1, 0.5, outer, device=at).unsqueeze(1)
    weight, weight_scale = quantize_blocks(random((outer, inner), problem, at, seed) * rows / inner**0.5)
    bias = random((outer,), problem, at, seed) if num % 2 == 0 else None
    if strided:
        x, x_scale = _within_wider_rows(x), _within_wider_rows(x_scale)
    return {"x": x, "x_scale": x_scale, "weight": weight, "weight_scale": weight_scale, "bias": bias}


def _within_wider_rows(x: Tensor) -> Tensor:
    wide = torch.zeros((x.shape[0], x.shape[1] + 48), dtype=x.dtype, device=x.device)
    cut = wide[:, 16 : 16 + x.shape[1]]
    return cut.copy_(x)
