"""Each family computes the same logits on several processes as on one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
import transformers
from process_pool import ProcessPool, RankBuild, Sizes, tensor_parallel
from tiny_families import FAMILIES, SMALL

from tokenspeed_core.api import ModelSpec
from tokenspeed_core.plugins import Catalog, Selection
from tokenspeed_core.plugins.entry import load_target
from tokenspeed_models.loading.dummy import read_dummy
from tokenspeed_models.testing import DenseBuild, sequence_logits
from tokenspeed_models.weights import WeightSlot

TOKENS = [3, 100, 7, 45, 0, 91, 12, 13, 14, 58, 2, 33]
EIGHT_EXPERTS = {
    "Qwen3Moe": {"num_experts": 8},
    "Mixtral": {"num_local_experts": 8},
    "GptOss": {"num_local_experts": 8},
    "Llama4": {"num_local_experts": 8},
}
PARALLEL = {
    "tp2": tensor_parallel(2),
    "tp4": tensor_parallel(4),
    "ep2": Sizes(experts=2),
    "tp2+ep2": Sizes(attn=2, dense=2, experts=2),
    "tp4+ep2": Sizes(attn=4, dense=4, moe=2, experts=2),
}
EXPERTS = (
    "Qwen3Moe",
    "Mixtral",
    "Glm4Moe",
    "Llama4",
    "MiniMaxM2",
    "GptOss",
    "DeepseekV2",
    "DeepseekV3",
)
TABLE = [
    (family, name)
    for family in FAMILIES
    for name in PARALLEL
    if family in EXPERTS or "ep" not in name
]


@cache
def specs() -> Mapping[str, ModelSpec]:
    catalog = Catalog.discover(Selection())
    entries = catalog.entries("models")
    return {entry.name: catalog.load(entry, ModelSpec) for entry in entries}  # type: ignore[misc]


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    keys = {**SMALL, **FAMILIES[family], **EIGHT_EXPERTS.get(family, {}), **changes}
    config = getattr(transformers, f"{family}ForCausalLM").config_class(**keys)
    return dict(config.to_dict())


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
    whole = DenseBuild()
    alone = load_target(load)(config, whole)
    weights = {slot.name: random_weight(slot) for slot in alone.weight_map()}
    model = load_target(load)(config, build)
    if form == "dummy":
        for each in (alone, model):
            each.load_weights(read_dummy("", each, lambda done, total: None))
    else:
        alone.load_weights(weights.items())
        if form == "stacked":
            weights = stacked(weights, num_experts=8)
        model.load_weights(weights.items())
    with torch.inference_mode():
        return [
            sequence_logits(each, context, TOKENS, chunk=7)
            for each, context in ((model, build), (alone, whole))
        ]


@pytest.mark.parametrize(("family", "parallelism"), TABLE)
def test_several_processes_compute_the_logits_of_one(
    family: str, parallelism: str, pool: ProcessPool
) -> None:
    load = specs()[f"{family}ForCausalLM"].load
    results = pool.run(both_logits, PARALLEL[parallelism], load, config_of(family))
    assert len(results) == PARALLEL[parallelism].layout(0).world_size
    for sharded, whole in results:
        torch.testing.assert_close(sharded, whole, rtol=1e-4, atol=1e-4 * float(whole.abs().max()))
        assert torch.equal(sharded, results[0][0])


@pytest.mark.parametrize("form", ["stacked", "dummy"])
def test_other_forms_of_experts_are_divided(form: str, pool: ProcessPool) -> None:
    load, config = specs()["Qwen3MoeForCausalLM"].load, config_of("Qwen3Moe")
    for sharded, whole in pool.run(both_logits, PARALLEL["tp4+ep2"], load, config, form):
        torch.testing.assert_close(sharded, whole, rtol=1e-4, atol=1e-4 * float(whole.abs().max()))


def test_documentation_lists_the_tested_combinations() -> None:
    page = (Path(__file__).parents[2] / "docs" / "parallelism.md").read_text()
    rows = [line.strip("|").split("|") for line in page.splitlines() if line.startswith("| ")]
    tables = iter(rows)
    header = next(row for row in tables if row[0].strip() == "family")
    names = [cell.strip().lower().replace(" ", "") for cell in header[1:]]
    listed = [
        (row[0].strip(), name)
        for row in tables
        if row[0].strip() in FAMILIES
        for name, cell in zip(names, row[1:], strict=True)
        if cell.strip() == "equal"
    ]
    assert listed == TABLE
