"""Checkpoints that stack the quantized weights of all experts load like those with a weight per expert."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
from integer_checkpoints import Stored
from process_pool import RankBuild, Sizes
from quantized_build import read_schemes
from quantized_forms import QUANTIZED_INPUTS, WEIGHT_ONLY, logits
from safetensors.torch import save_file
from test_quantization_mxfp4_experts import FAMILIES, save
from torch import Tensor

from tokenspeed_core.api import LayerSchemes
from tokenspeed_models.layers import Experts
from tokenspeed_models.weights import WeightMap

SHAPE = {"num_experts": 4, "top_k": 1, "hidden_size": 32, "intermediate_size": 64}
# The projections in a stacked tensor, and their names in checkpoints of Mixtral.
PROJECTIONS = {
    "gate_up_proj": {"gate_proj": "w1", "up_proj": "w3"},
    "down_proj": {"down_proj": "w2"},
}


def stack(tensors: Stored, num_experts: int) -> Stored:
    """Return the tensors with those of all experts of a layer as one tensor [E, rows, columns]."""
    found = {name: tensor for name, tensor in tensors.items() if "experts." not in name}
    of_experts = [name for name in tensors if name not in found]
    layers = {name.partition("experts.")[0] for name in of_experts}
    parts = {name.rpartition(".")[2] for name in of_experts} - {"weight_shape"}
    for layer, (target, names), part in product(layers, PROJECTIONS.items(), parts):
        each = [
            name if f"{layer}experts.0.{name}.{part}" in tensors else names[name] for name in names
        ]
        experts = [
            torch.cat([tensors[f"{layer}experts.{expert}.{name}.{part}"] for name in each])
            for expert in range(num_experts)
        ]
        found[f"{layer}experts.{target}.{part}"] = torch.stack(experts)
    return found


@pytest.mark.parametrize("family", ["Mixtral", pytest.param("Qwen3Moe", marks=pytest.mark.release)])
def test_logits_equal_those_of_single_experts(family: str, tmp_path: Path) -> None:
    settings, _, stored = save(family, tmp_path)
    expected = logits(tmp_path, settings, FAMILIES[family])
    stacked = stack(stored, num_experts=5)
    assert not any("experts.0." in name for name in stacked)
    save_file(stacked, tmp_path / "model.safetensors")
    assert torch.equal(logits(tmp_path, settings, FAMILIES[family]), expected)


def load(schemes: LayerSchemes, sizes: Sizes, rank: int, tensors: Stored) -> Tensor:
    """Return all values of the experts in a layer of a single process."""
    build = RankBuild(sizes.layout(rank))
    build.schemes = schemes
    experts = Experts(build, **SHAPE)
    WeightMap(experts.slots(""), groups=build.group).load(tensors.items())
    return torch.cat([each.flatten() for each in experts._operands if each is not None])


def random_tensors(form: str) -> tuple[LayerSchemes, Stored]:
    """Return the schemes and the tensors of a layer of single experts."""
    build, generator = RankBuild(), torch.Generator().manual_seed(4)
    build.schemes = read_schemes({**WEIGHT_ONLY, **QUANTIZED_INPUTS}[form][0])[1]
    return build.schemes, {
        slot.name: torch.randint(1, 100, slot.target.shape, generator=generator).to(slot.dtype)
        for slot in WeightMap(Experts(build, **SHAPE).slots(""))
    }


@pytest.mark.parametrize("form", ["MXFP4A16", "W4A16 asymmetric", "W8A8"])
@pytest.mark.parametrize(
    "sizes", [Sizes(moe=2), Sizes(experts=2), Sizes(moe=2, experts=2)], ids=str
)
def test_stacked_experts_are_divided_like_single_experts(sizes: Sizes, form: str) -> None:
    schemes, tensors = random_tensors(form)
    stacked = stack(tensors, num_experts=4)
    loaded = [load(schemes, sizes, rank, tensors) for rank in range(sizes.layout(0).world_size)]
    for rank, expected in enumerate(loaded):
        assert torch.equal(load(schemes, sizes, rank, stacked), expected)
    assert not torch.equal(loaded[0], loaded[1])


def test_missing_or_wrong_scale_is_named() -> None:
    schemes, tensors = random_tensors("MXFP4A16")
    stacked = stack(tensors, num_experts=4)
    name = "experts.down_proj.weight_scale"
    scale = stacked.pop(name)
    with pytest.raises(ValueError, match=r"missing: experts.0.down_proj.weight_scale") as missing:
        load(schemes, Sizes(), 0, stacked)
    with pytest.raises(ValueError, match=rf"{name} has shape \[4, 32, 1\]") as wrong:
        load(schemes, Sizes(), 0, {**stacked, name: scale[..., :1]})
    assert not any("\n" in str(each.value) for each in (missing, wrong))
