"""Input generators for the ops of `contracts.integer`, as those of `inputs`."""

from __future__ import annotations

import math
from typing import Any

import torch
from tokenspeed_testing.inputs import random, random_rows
from torch import Generator, Tensor, device

from tokenspeed_core.api import Problem
from tokenspeed_kernels.inputs import moe_experts, moe_experts_fp8, quantized_experts
from tokenspeed_kernels.reference.int8 import quantize_rows


def linear_w4a16(
    problem: Problem, num: int, at: device, seed: Generator, strided: bool
) -> dict[str, Any]:
    """Make x [T, I] and a random weight of unit gain; zero points for even T, an order and a bias for some T."""
    inner, outer = problem["in_size"], problem["out_size"]
    num_groups = inner // (problem["group_size"] or inner)
    weight = torch.randint(0, 256, (outer, inner // 2), generator=seed, dtype=torch.uint8)
    zero = torch.randint(0, 16, (outer, num_groups), generator=seed, dtype=torch.uint8)
    order = torch.randperm(inner, generator=seed).to(torch.int32)
    gain = random((outer, num_groups), problem, at, seed).abs().add_(0.5) / (8 * inner**0.5)
    return {
        "x": random_rows(num, inner, problem, at, seed, strided),
        "weight": weight.to(at),
        "scale": gain,
        "zero": zero.to(at) if num % 2 == 0 else None,
        "order": order.to(at) if num % 3 == 0 else None,
        "bias": random((outer,), problem, at, seed) if num % 4 < 2 else None,
    }


def linear_mxfp4(
    problem: Problem, num: int, at: device, seed: Generator, strided: bool
) -> dict[str, Any]:
    """Make x [T, I] and random codes with power-of-two scales; a bias for some T."""
    shape = {**problem, "group_size": 32}
    given = linear_w4a16(shape, num, at, seed, strided)
    exponent = torch.randint(-3, 2, given["scale"].shape, generator=seed)
    code = 127 + exponent - round(0.5 * math.log2(problem["in_size"]))
    return {
        "x": given["x"],
        "weight": given["weight"],
        "scale": code.to(at, torch.uint8),
        "bias": given["bias"],
    }


def moe_experts_w4a16(
    problem: Problem, num: int, at: device, seed: Generator, strided: bool
) -> dict[str, Any]:
    """Make the inputs of `moe_experts` with packed weights; zero points for even T, an order for some T."""
    experts = problem["num_experts"]
    size, inner = problem["hidden_size"], problem["intermediate_size"]
    given = moe_experts(problem, num, at, seed, strided)
    made = {"x": given["x"]}
    for name, rows, columns in (("gate_up", 2 * inner, size), ("down", size, inner)):
        shape = {**problem, "in_size": columns, "out_size": experts * rows}
        weight = linear_w4a16(shape, num, at, seed, strided)
        for part in ("weight", "scale", "zero"):
            full = name if part == "weight" else f"{name}_{part}"
            each = weight[part]
            made[full] = None if each is None else each.view(experts, rows, -1)
        order = torch.stack([torch.randperm(columns, generator=seed) for _ in range(experts)])
        made[f"{name}_order"] = order.to(torch.int32).to(at) if num % 3 == 0 else None
    return {**made, "weights": given["weights"], "ids": given["ids"]}


def moe_experts_mxfp4(
    problem: Problem, num: int, at: device, seed: Generator, strided: bool
) -> dict[str, Any]:
    """Make the inputs of `moe_experts` with packed weights of about unit gain."""
    experts = problem["num_experts"]
    size, inner = problem["hidden_size"], problem["intermediate_size"]
    given = moe_experts(problem, num, at, seed, strided)
    made = {"x": given["x"]}
    for name, rows, columns in (("gate_up", 2 * inner, size), ("down", size, inner)):
        shape = {**problem, "in_size": columns, "out_size": experts * rows}
        weight = linear_mxfp4(shape, num, at, seed, strided)
        made[name] = weight["weight"].view(experts, rows, -1)
        made[f"{name}_scale"] = weight["scale"].view(experts, rows, -1) - 2
    return {**made, "weights": given["weights"], "ids": given["ids"]}


def quantize_static(
    problem: Problem, num: int, at: device, seed: Generator, strided: bool
) -> dict[str, Any]:
    """Make x [T, N] and a scale [1] that some values exceed."""
    x = random_rows(num, problem["size"], problem, at, seed, strided)
    return {"x": x, "scale": torch.full((1,), 0.0181, device=at)}


def linear_int8(
    problem: Problem, num: int, at: device, seed: Generator, strided: bool
) -> dict[str, Any]:
    """Make x [T, I] and weight [O, I] of unit gain, both quantized per row, and a bias [O] for even T."""
    inner, outer = problem["in_size"], problem["out_size"]
    x, x_scale = quantize_rows(random((num, inner), problem, at, seed))
    weight, weight_scale = quantize_rows(random((outer, inner), problem, at, seed) / inner**0.5)
    return {
        "x": _within_wider_rows(x) if strided else x,
        "x_scale": x_scale,
        "weight": weight,
        "weight_scale": weight_scale,
        "bias": random((outer,), problem, at, seed) if num % 2 == 0 else None,
    }


def moe_experts_int8(
    problem: Problem, num: int, at: device, seed: Generator, strided: bool
) -> dict[str, Any]:
    """Like the inputs of `moe_experts_fp8`, with INT8 weights."""
    return quantized_experts(moe_experts(problem, num, at, seed, strided), quantize_rows)


def moe_experts_int8_static(
    problem: Problem, num: int, at: device, seed: Generator, strided: bool
) -> dict[str, Any]:
    """Like the inputs of `moe_experts_int8`, with scales of the activations."""
    return _with_input_scales(moe_experts_int8(problem, num, at, seed, strided))


def moe_experts_fp8_static(
    problem: Problem, num: int, at: device, seed: Generator, strided: bool
) -> dict[str, Any]:
    """Like the inputs of `moe_experts_fp8`, with scales of the activations."""
    return _with_input_scales(moe_experts_fp8(problem, num, at, seed, strided))


def _with_input_scales(given: dict[str, Any]) -> dict[str, Any]:
    """Put the scale of its inputs, which some inputs exceed, before each weight."""
    x = given["x"]
    scale = torch.full((1,), 0.0181, device=x.device)
    return {
        "x": x,
        "gate_up_input": scale,
        **{name: given[name] for name in ("gate_up", "gate_up_scale")},
        "down_input": scale.clone(),
        **{name: given[name] for name in ("down", "down_scale", "weights", "ids")},
    }


def _within_wider_rows(x: Tensor) -> Tensor:
    """Return the same values as a view of wider rows."""
    wide = torch.zeros((x.shape[0], x.shape[1] + 32), dtype=x.dtype, device=x.device)
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]
