"""Layers of experts that move, in a process of a pool. Imports no large library, because every process imports it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from process_pool import RankBuild
from test_quantization_parallel import FORMS, GPT_OSS, scheme_of
from tokenspeed_models_gpt_oss.describe import read_gpt_oss
from tokenspeed_models_gpt_oss.experts import GptOssExperts

from tokenspeed_core.api import ExpertBalance
from tokenspeed_core.executor.expert_placement import NUM_TURNS
from tokenspeed_core.worker.expert_balancer import ExpertBalancer
from tokenspeed_models.layers.experts import Experts
from tokenspeed_models.weights import WeightMap

SIZES: dict[str, int] = {
    "num_experts": 8,
    "top_k": 2,
    "hidden_size": 128,
    "intermediate_size": 128,
}
PREPARED = "prepared"  # unquantized, for a kernel with its own layout
NUM_STEPS = 30
INTERVAL = 4


Outputs = list[list[torch.Tensor]]


class PreparedExperts:
    """Experts with weights in another order: up before gate, and the input features reversed."""

    def __init__(self, experts: Callable[..., torch.Tensor]) -> None:
        self._experts = experts

    def prepare_weights(self, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        for expert in range(len(gate_up)):
            gate_up[expert] = _reordered(gate_up[expert])
            down[expert] = down[expert].flip(1)

    def __call__(
        self, x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, *routes: torch.Tensor
    ) -> torch.Tensor:
        gate_ups = [_reordered(expert) for expert in gate_up]
        return self._experts(x, torch.stack(gate_ups), down.flip(2), *routes)


def _reordered(gate_up: torch.Tensor) -> torch.Tensor:
    """Return weights [2I, N] with the halves of their rows exchanged and their columns reversed."""
    return torch.cat(gate_up.chunk(2)[::-1]).flip(1)


class PreparingBuild(RankBuild):
    """A build with such experts."""

    def op(self, op: str, **problem: Any) -> Callable[..., Any]:
        kernel = super().op(op, **problem)
        return PreparedExperts(kernel) if op == "moe_experts" else kernel


def make_experts(build: RankBuild, form: str | None) -> Experts | GptOssExperts:
    if form is None or form == PREPARED:
        return Experts(build, **SIZES)
    if form in FORMS:
        build.schemes = scheme_of(FORMS[form][0])
        return Experts(build, **SIZES)
    if form == "gpt-oss in MXFP4":
        build.schemes = scheme_of({"quant_method": "mxfp4"})
    names = {"num_experts": "num_local_experts", "top_k": "num_experts_per_tok"}
    config = {names.get(name, name): value for name, value in SIZES.items()}
    return GptOssExperts(build, read_gpt_oss({**GPT_OSS, **config}))


def random_weight(
    weight: torch.Tensor, generator: torch.Generator, *, is_exponent: bool
) -> torch.Tensor:
    """Return the weights of all eight experts, for an operand with those of some."""
    shape = (8, *weight.shape[1:])
    if weight.dtype == torch.int32:  # the order of the input features
        return torch.arange(shape[1]).expand(shape)
    if weight.dtype == torch.uint8:
        low, high = (118, 124) if is_exponent else (0, 16)
        return torch.randint(low, high, shape, generator=generator)
    values = torch.randn(shape, generator=generator)
    return values if weight.ndim == 3 else values.abs()


def make_layer(
    build: RankBuild, form: str | None, generator: torch.Generator
) -> Experts | GptOssExperts:
    """Return a layer with this process's part of random weights. Unused slots are not finite."""
    layer, wholes = make_experts(build, form), []
    num, rank = layer.local.num, build.group("experts").rank
    for weight in layer._operands:
        if weight is None:
            continue
        is_exponent = (
            form in ("gpt-oss in MXFP4", "mxfp4", "mxfp8")
            and weight.shape[-1] == SIZES["hidden_size"] // 32
        )
        whole = random_weight(weight, generator, is_exponent=is_exponent)
        weight.copy_(torch.full(weight.shape, float("nan")))
        weight[:num] = whole[num * rank : num * (rank + 1)].to(weight.dtype)
        wholes.append(whole)
    if form == PREPARED:
        names = ("experts.gate_up_proj", "experts.down_proj")
        WeightMap(layer.slots(""), groups=build.group).load(zip(names, wholes, strict=True))
    return layer


def run_layers(
    build: RankBuild, num_redundant: int | None, form: str | None = None
) -> tuple[Outputs, list[np.ndarray[Any, Any]], int]:
    """Run two layers for some steps; return their outputs, the last placements and the number of moves.

    Without `num_redundant`, experts do not move.
    """
    balance = None if num_redundant is None else ExpertBalance(num_redundant, NUM_TURNS)
    if form == PREPARED:
        build = PreparingBuild(build._layout, build._handles)
    build.expert_balance = balance
    generator = torch.Generator().manual_seed(3)
    layers = [make_layer(build, form, generator) for _ in range(2)]
    balancer = None
    if balance is not None:
        balancer = ExpertBalancer(balance, build._layout, build._handles, INTERVAL)
        balancer.start()
    generator, outputs = torch.Generator().manual_seed(5), []
    for _ in range(NUM_STEPS):
        if balancer is not None:
            balancer.begin_step()
        x = torch.randn(9, SIZES["hidden_size"], generator=generator)
        weights = torch.rand(9, 2, generator=generator)
        # The first experts, which one process holds at first, get most tokens.
        scores = torch.rand(9, 8, generator=generator) * torch.tensor([9.0] * 3 + [1.0] * 5)
        ids = scores.topk(2).indices.to(torch.int32)
        outputs.append([layer(x, weights, ids) for layer in layers])
    if balancer is None:
        return outputs, [], 0
    return outputs, balancer._placements, balancer.num_moves
