"""Sharding annotations: no collective in one process, the expected ones in several."""

from __future__ import annotations

from typing import Any

import pytest

from tokenspeed_models.families.llama import LlamaForCausalLM
from tokenspeed_models.families.qwen3_moe import Qwen3MoeForCausalLM
from tokenspeed_models.layers import CausalLM
from tokenspeed_models.sharding import (
    Partial,
    ProcessGroups,
    Replicated,
    Sharded,
    ShardingSpec,
    plan_collectives,
)
from tokenspeed_models.testing import DenseBuild

SMALL: dict[str, Any] = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "head_dim": 8,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
}


@pytest.fixture(params=[LlamaForCausalLM, Qwen3MoeForCausalLM])
def model(request: pytest.FixtureRequest) -> CausalLM:
    built: CausalLM = request.param(SMALL, DenseBuild())
    return built


def test_one_process_needs_no_collective(model: CausalLM) -> None:
    plan = plan_collectives(model.sharding(), ProcessGroups())
    assert plan.collectives == ()
    assert str(plan.num_modules) in plan.explain()


def test_several_processes_reduce_after_each_block(model: CausalLM) -> None:
    plan = plan_collectives(model.sharding(), ProcessGroups(attn=4, dense=4, moe=4))
    names = [each.name for each in plan.collectives]
    assert names == ["all_reduce"] * (1 + 2 * 2) + ["all_gather(vocab)"]
    assert "head -> sampling: all_gather(vocab)" in plan.explain()


def test_attention_may_be_sharded_alone(model: CausalLM) -> None:
    plan = plan_collectives(model.sharding(), ProcessGroups(attn=2))
    names = [each.name for each in plan.collectives]
    assert names == ["all_reduce"] * 3 + ["all_gather(vocab)"]


@pytest.mark.parametrize(
    ("output", "needed", "name"),
    [
        (Partial(), Sharded("tokens"), "reduce_scatter(tokens)"),
        (Sharded("tokens"), Replicated(), "all_gather(tokens)"),
        (Replicated(), Sharded("tokens"), "slice(tokens)"),
    ],
)
def test_collective_follows_from_both_shardings(output: Any, needed: Any, name: str) -> None:
    chain = [
        ShardingSpec("a", "attn", Replicated(), output),
        ShardingSpec("b", "attn", needed, Replicated()),
    ]
    plan = plan_collectives(chain, ProcessGroups(attn=2))
    assert [each.name for each in plan.collectives] == [name]


def test_impossible_sharding_is_refused_by_module_name() -> None:
    chain = [
        ShardingSpec("a", "attn", Replicated(), Sharded("heads")),
        ShardingSpec("b", "attn", Partial(), Partial()),
    ]
    with pytest.raises(ValueError, match="a -> b"):
        plan_collectives(chain, ProcessGroups(attn=2))


def test_unequal_or_unknown_groups_are_refused() -> None:
    unequal = [
        ShardingSpec("a", "attn", Replicated(), Partial()),
        ShardingSpec("b", "moe", Replicated(), Partial()),
    ]
    with pytest.raises(ValueError, match=r"\[2, 4\]"):
        plan_collectives(unequal, ProcessGroups(attn=2, moe=4))
    unknown = ShardingSpec("c", "all", Partial(), Partial())
    with pytest.raises(ValueError, match="'all'"):
        plan_collectives([*unequal, unknown], ProcessGroups())


def test_weight_map_has_the_shard_of_each_weight(model: CausalLM) -> None:
    shards = {slot.name: slot.shard for slot in model.weight_map()}
    key = shards["model.layers.0.self_attn.k_proj.weight"]
    out = shards["model.layers.0.self_attn.o_proj.weight"]
    assert key is not None
    assert (key.axis, key.group, key.num_heads) == (0, "attn", 2)
    assert out is not None
    assert (out.axis, out.group) == (1, "attn")
    assert shards["model.norm.weight"] is None
