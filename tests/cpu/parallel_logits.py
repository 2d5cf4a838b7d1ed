"""The work of each process of a pool. Imports no large library, because every process imports it."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any
from zlib import crc32

import torch
from process_pool import RankBuild

from tokenspeed_core.api import Collective
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


def plugin_logits(
    build: RankBuild, folder: str, load: str, config: dict[str, Any]
) -> list[torch.Tensor]:
    """Return the result of `both_logits` for a family in a package in a folder."""
    sys.path.insert(0, folder)
    try:
        return both_logits(build, load, config)
    finally:
        sys.path.remove(folder)


def routed_logits(build: RankBuild, load: str, config: dict[str, Any]) -> list[torch.Tensor]:
    """Return what `both_logits` does, if tokens travel only to the processes of their experts."""
    build.routes_tokens = True
    return both_logits(build, load, config)


def fused_logits(
    build: RankBuild, load: str, config: dict[str, Any]
) -> tuple[int, list[torch.Tensor]]:
    """Return the fused all-reduces, and what `both_logits` does: chunks of 7 and 5 tokens, of which the latter fuse."""
    build.max_fused_tokens = 5
    logits = both_logits(build, load, config)
    return len(build.fused_ops), logits


def logits_of_parts(
    build: RankBuild, load: str, config: dict[str, Any], max_fused_tokens: int
) -> tuple[int, list[torch.Tensor]]:
    """Return how many outputs were sent in parts, and what `both_logits` does: chunks of 7 and 5 tokens."""
    build.max_fused_tokens, build.sends_parts = max_fused_tokens, True
    logits = both_logits(build, load, config)
    return build.num_sent, logits


def draft_collectives(
    build: RankBuild, load: str, config: dict[str, Any], load_draft: str, draft: dict[str, Any]
) -> tuple[list[str], list[str]]:
    """Return the collectives that the plan has for a draft model, and those that a pass of it runs."""
    target: Any = load_target(load)(config, build)
    planned: list[str] = []
    run: list[str] = []
    draft_build, bind = build.new(), build.comm

    def comm(collective: Collective) -> Any:
        planned.append(collective.op)
        return bind(collective)

    draft_build.comm = comm  # type: ignore[method-assign]
    model: Any = load_target(load_draft)(draft, draft_build, target)
    for slot in (*target.weight_map(), *model.weight_map()):
        slot.target.fill_(0.1 if slot.target.is_floating_point() else 0)
    calls = {each: getattr(torch.distributed, each) for each in ("all_reduce", "all_gather")}

    def counted(name: str) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            run.append(name)
            return calls[name](*arguments, **keywords)

        return call

    tokens = torch.tensor(TOKENS) % config["vocab_size"]
    hidden = torch.zeros(len(TOKENS), config["hidden_size"])
    try:
        for name in calls:
            setattr(torch.distributed, name, counted(name))
        with torch.inference_mode():
            positions = torch.arange(len(tokens))
            if hasattr(model, "forward_block"):
                model.logits(model.forward_block(tokens, positions))
            else:
                model.logits(model.forward(tokens, positions, hidden, None))
    finally:
        for name, call in calls.items():
            setattr(torch.distributed, name, call)
    return planned, run


def count_sent(build: RankBuild, num_experts: int, top_k: int) -> tuple[int, int]:
    """Exchange tokens; return how many this process sent to others, and how many have an expert there."""
    group = build.group("data")
    kernel: Any = build.comm(
        Collective("exchange_tokens", "data", 5, "float32", "gate", "experts", "test")
    )
    generator = torch.Generator().manual_seed(group.rank)
    num_tokens = 40 + group.rank
    ids = torch.rand(num_tokens, num_experts, generator=generator).argsort(1)[:, :top_k]
    per_process = num_experts // group.size
    owners = torch.arange(num_experts, dtype=torch.int32) // per_process
    sent = []
    call = torch.distributed.all_to_all_single

    def counted(*arguments: Any, **keywords: Any) -> Any:
        if len(arguments) > 2 and arguments[1].dtype == torch.float32:
            sent.append(sum(arguments[3]) - arguments[3][group.rank])
        return call(*arguments, **keywords)

    torch.distributed.all_to_all_single = counted
    try:
        x, weights = torch.randn(num_tokens, 5), torch.rand(num_tokens, top_k)
        kernel(x, weights, ids.int(), owners, lambda x, weights, ids: x)
    finally:
        torch.distributed.all_to_all_single = call
    pairs = {
        (token, expert // per_process) for token, row in enumerate(ids.tolist()) for expert in row
    }
    return sent[0], sum(owner != group.rank for _, owner in pairs)


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
