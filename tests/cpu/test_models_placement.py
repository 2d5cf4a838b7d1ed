"""Placements at module boundaries: the identity in one process, the expected collectives in several."""

from __future__ import annotations

from typing import Any

import pytest

from tokenspeed_models.layers import CausalLM
from tokenspeed_models.llama import LlamaForCausalLM
from tokenspeed_models.placement import (
    Boundary,
    Partial,
    ProcessGroups,
    Replicated,
    Sharded,
    compile_placements,
)
from tokenspeed_models.qwen3_moe import Qwen3MoeForCausalLM
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


def test_one_process_needs_no_collective_and_the_plan_says_so(model: CausalLM) -> None:
    plan = compile_placements(model.boundaries(), ProcessGroups())
    assert plan.transitions == ()
    assert (
        plan.explain()
        == f"collectives: none, {plan.num_boundaries} module boundaries in groups of one process"
    )


def test_several_processes_sum_after_each_block_and_gather_the_vocabulary(model: CausalLM) -> None:
    plan = compile_placements(model.boundaries(), ProcessGroups(attn=4, dense=4, moe=4))
    kinds = [item.collective for item in plan.transitions]
    assert kinds == ["all_reduce"] * (1 + 2 * 2) + ["all_gather(vocab)"]
    assert "head -> sampling: all_gather(vocab)" in plan.explain()


def test_dense_layers_may_stand_alone_while_attention_is_cut(model: CausalLM) -> None:
    plan = compile_placements(model.boundaries(), ProcessGroups(attn=2))
    assert [item.collective for item in plan.transitions] == ["all_reduce"] * 3 + [
        "all_gather(vocab)"
    ]


@pytest.mark.parametrize(
    ("gives", "takes", "collective"),
    [
        (Partial(), Sharded("tokens"), "reduce_scatter(tokens)"),
        (Sharded("tokens"), Replicated(), "all_gather(tokens)"),
        (Replicated(), Sharded("tokens"), "slice(tokens)"),
    ],
)
def test_each_pair_of_placements_has_its_collective(
    gives: Any, takes: Any, collective: str
) -> None:
    chain = [Boundary("a", "attn", Replicated(), gives), Boundary("b", "attn", takes, Replicated())]
    plan = compile_placements(chain, ProcessGroups(attn=2))
    assert [item.collective for item in plan.transitions] == [collective]


def test_what_no_collective_mends_is_refused_with_its_place() -> None:
    chain = [
        Boundary("a", "attn", Replicated(), Sharded("heads")),
        Boundary("b", "attn", Partial(), Partial()),
    ]
    with pytest.raises(
        ValueError, match=r"a -> b: no collective leads from sharded\(heads\) to partial"
    ):
        compile_placements(chain, ProcessGroups(attn=2))
    unequal = [
        Boundary("a", "attn", Replicated(), Partial()),
        Boundary("b", "moe", Replicated(), Partial()),
    ]
    with pytest.raises(ValueError, match=r"groups of \[2, 4\]"):
        compile_placements(unequal, ProcessGroups(attn=2, moe=4))
    with pytest.raises(ValueError, match="unknown process group 'all'"):
        compile_placements([*unequal, Boundary("c", "all", Partial(), Partial())], ProcessGroups())


def test_the_weight_map_says_how_each_weight_is_cut(model: CausalLM) -> None:
    shards = {slot.name: slot.shard for slot in model.weight_map()}
    key, out = (
        shards["model.layers.0.self_attn.k_proj.weight"],
        shards["model.layers.0.self_attn.o_proj.weight"],
    )
    assert key is not None
    assert (key.axis, key.group, key.num_heads) == (0, "attn", 2)
    assert out is not None
    assert (out.axis, out.group) == (1, "attn")
    assert shards["model.norm.weight"] is None
