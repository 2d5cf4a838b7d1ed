"""Input generators for the ops of `contracts.biased_experts`, used by the conformance kit and the benchmarks.

Each takes a problem, the number of rows, a device, a random generator, and whether inputs are strided views.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from tokenspeed_testing.inputs import random
from torch import Generator, Tensor, device

from tokenspeed_core.api import Problem
from tokenspeed_kernels.inputs import moe_experts
from tokenspeed_kernels.reference.biased_experts import GROUP

_CODE_SIZE = 2.93  # root mean square of the values of all codes


def moe_biased_experts(
    problem: Problem, num: int, at: device, seed: Generator, strided: bool
) -> dict[str, Any]:
    """Make the inputs of `moe_experts`, larger so that some values exceed the limit, and biases."""
    given = moe_experts(problem, num, at, seed, strided)
    experts, size = problem["num_experts"], problem["hidden_size"]
    inner = problem["intermediate_size"]
    return {
        "x": given["x"],
        "gate_up": given["gate_up"] * (problem["limit"] / 2),
        "gate_up_bias": random((experts, 2 * inner), problem, at, seed),
        "down": given["down"] / problem["limit"],
        "down_bias": random((experts, size), problem, at, seed),
        "weights": given["weights"],
        "ids": given["ids"],
    }


def moe_biased_experts_mxfp4(
    problem: Problem, num: int, at: device, seed: Generator, strided: bool
) -> dict[str, Any]:
    """Like `moe_biased_experts`, with random codes and scales. Raises ValueError for sizes that are not multiples of GROUP."""
    for axis in ("hidden_size", "intermediate_size"):
        if problem[axis] % GROUP:
            raise ValueError(f"{axis} {problem[axis]} is not a multiple of {GROUP}")
    given = moe_biased_experts(problem, num, at, seed, strided)
    made = {"x": given["x"]}
    for name, gain in (("gate_up", problem["limit"] / 2), ("down", 1 / problem["limit"])):
        shape = given[name].shape
        made[name] = _bytes(0, 256, (*shape[:2], shape[2] // 2), seed).to(at)
        exponent = 127 + round(math.log2(gain / _CODE_SIZE / shape[2] ** 0.5))
        scale_shape = (*shape[:2], shape[2] // GROUP)
        made[f"{name}_scale"] = _bytes(exponent - 1, exponent + 2, scale_shape, seed).to(at)
        made[f"{name}_bias"] = given[f"{name}_bias"]
    return {**made, "weights": given["weights"], "ids": given["ids"]}


def _bytes(low: int, high: int, shape: tuple[int, ...], seed: Generator) -> Tensor:
    return torch.randint(low, high, shape, dtype=torch.uint8, generator=seed)
