"""The work of each process of a pool. Imports no large library, because every process imports it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import cache
from typing import Any
from zlib import crc32

import torch
from process_pool import RankBuild

from tokenspeed_core.targets import load_target
from tokenspeed_models.loading.dummy import read_dummy
from tokenspeed_models.testing import DenseBuild, sequence_logits
from tokenspeed_models.weights import WeightSlot

TOKENS = [3, 100, 7, 45, 0, 91, 12, 13, 14, 58, 2, 33]


def random_weight(slot: WeightSlot) -> torch.Tensor:
    """Return weights that depend on the name alone, such that activations neither vanish nor grow."""
    generator = torch.Generator().manual_seed(crc32(slot.name.encode()))
    values = torch.empty(slot.target.shape).normal_(generator=generator)
    if slot.kind == "norm":
        return 1 + values / 10
    return values / (10 if slot.kind == "bias" else math.sqrt(slot.target.shape[-1]))


def stacked(weights: Mapping[str, torch.Tensor], num_experts: int) -> dict[str, torch.Tensor]:
    """Return the weights with those of all experts of a layer in two tensors."""
    found = {name: tensor for name, tensor in weights.items() if ".experts." not in name}
    layers = dict.fromkeys(name.partition("experts.")[0] for name in weights.keys() - found.keys())
    for layer in layers:
        for target, names in (
            ("gate_up_proj", ("gate_proj", "up_proj")),
            ("down_proj", ("down_proj",)),
        ):
            experts = [
                torch.cat([weights[f"{layer}experts.{expert}.{name}.weight"] for name in names])
                for expert in range(num_experts)
            ]
            found[f"{layer}experts.{target}"] = torch.stack(experts)
    return found


def both_logits(
    build: RankBuild, load: str, config: dict[str, Any], form: str = "random"
) -> list[torch.Tensor]:
    """Return the logits of one of several processes, and those of a single process."""
    weights, whole = checkpoint(load, json.dumps(config), is_dummy=form == "dummy")
    model = load_target(load)(config, build)
    if form == "dummy":
        model.load_weights(read_dummy("", model, lambda done, total: None))
    else:
        given = stacked(weights, num_experts=8) if form == "stacked" else weights
        model.load_weights(given.items())
    with torch.inference_mode():
        return [sequence_logits(model, build, TOKENS, chunk=7), whole]


@cache
def checkpoint(
    load: str, config: str, *, is_dummy: bool
) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
    """Return the weights of a family, and their logits in one process."""
    build = DenseBuild()
    model = load_target(load)(json.loads(config), build)
    weights = (
        dict(read_dummy("", model, lambda done, total: None))
        if is_dummy
        else {slot.name: random_weight(slot) for slot in model.weight_map()}
    )
    model.load_weights(weights.items())
    with torch.inference_mode():
        return weights, sequence_logits(model, build, TOKENS, chunk=7)
