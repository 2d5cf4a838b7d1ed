"""Sharding annotations: no collective in one process, the expected ones in several, and clear refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tokenspeed_models_olmo.model import Olmo2ForCausalLM

from tokenspeed_core.api import (
    FUSED_OP,
    Collective,
    FusedCollective,
    ParallelLayout,
    PlatformInfo,
)
from tokenspeed_core.errors import CheckpointError, ConfigError
from tokenspeed_core.kernels.plan import PlannedCollective
from tokenspeed_core.kernels.table import kernel_table
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_core.resolved import Resolved
from tokenspeed_core.worker.assemble import plan_for
from tokenspeed_core.worker.local import plan_only
from tokenspeed_models.families.llama import LlamaForCausalLM
from tokenspeed_models.families.qwen3_moe import Qwen3MoeForCausalLM
from tokenspeed_models.sharding import (
    Partial,
    Replicated,
    Sharded,
    ShardingSpec,
    bind_output,
    compile_sharding,
)
from tokenspeed_models.testing import DenseBuild
from tokenspeed_models.weights import Shard, StackedShard

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


class PlanningBuild(DenseBuild):
    """A build of one of several processes that records the collectives."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(layout=ParallelLayout.of(0, **sizes))
        self.collectives: list[Collective] = []
        self.fusible: list[str] = []

    def comm(self, collective: Collective) -> Callable[[torch.Tensor], torch.Tensor]:
        self.collectives.append(collective)
        return lambda x: x

    def fused_comm(self, all_reduce: Collective) -> FusedCollective | None:
        self.fusible.append(all_reduce.source)
        return None

    def summary(self) -> list[tuple[str, str, int]]:
        return [(each.source, each.op, each.size) for each in self.collectives]


def block_outputs(layer: int) -> list[tuple[str, str, int]]:
    return [
        (f"layers.{layer}.attention.out", "all_reduce", 16),
        (f"layers.{layer}.mlp.experts", "all_reduce", 16),
    ]


def test_one_process_needs_no_collective() -> None:
    build = PlanningBuild()
    Qwen3MoeForCausalLM(SMALL, build)
    assert build.collectives == []


def test_only_sums_that_a_norm_adds_may_be_fused() -> None:
    alone, shared, with_post_norms = (PlanningBuild(), *(PlanningBuild(attn=2) for _ in range(2)))
    LlamaForCausalLM(SMALL, alone)
    LlamaForCausalLM(SMALL, shared)
    Olmo2ForCausalLM(SMALL, with_post_norms)
    assert alone.fusible == with_post_norms.fusible == []
    assert shared.fusible == ["layers.0.attention.out", "layers.1.attention.out"]
    own_tokens = PlanningBuild(experts=2, data=2)
    Qwen3MoeForCausalLM(SMALL, own_tokens)
    assert own_tokens.fusible == []


def test_blocks_are_reduced_and_logits_gathered() -> None:
    build = PlanningBuild(attn=2, dense=2, experts=2)
    Qwen3MoeForCausalLM(SMALL, build)
    assert build.summary() == [
        ("embedding", "all_reduce", 16),
        *block_outputs(0),
        *block_outputs(1),
        ("head", "all_gather", 32),
    ]
    groups = [each.group for each in build.collectives]
    assert groups == ["attn", *2 * ("attn", "experts"), "attn"]


def test_features_and_experts_are_reduced_together() -> None:
    build = PlanningBuild(attn=4, dense=4, moe=2, experts=2)
    Qwen3MoeForCausalLM({**SMALL, "num_key_value_heads": 1}, build)
    assert build.collectives[2].group == "world"


def test_experts_get_the_tokens_of_all_processes() -> None:
    build = PlanningBuild(experts=2, data=2)
    Qwen3MoeForCausalLM(SMALL, build)
    assert build.summary() == [
        (source, op, 16)
        for layer in range(2)
        for source, op in (
            (f"layers.{layer}.post_norm", "all_gather_tokens"),
            (f"layers.{layer}.mlp.experts", "reduce_scatter_tokens"),
        )
    ]
    assert {each.group for each in build.collectives} == {"data"}


def test_engines_of_several_processes_reduce_their_own_tokens_last() -> None:
    build = PlanningBuild(attn=2, dense=2, experts=4, data=2)
    Qwen3MoeForCausalLM({**SMALL, "num_experts": 8}, build)
    layers = [
        (f"layers.{layer}.{source}", op, group)
        for layer in range(2)
        for source, op, group in (
            ("attention.out", "all_reduce", "attn"),
            ("post_norm", "all_gather_tokens", "data"),
            ("mlp.experts", "reduce_scatter_tokens", "data"),
            ("mlp.experts", "all_reduce", "engine"),
        )
    ]
    found = [(each.source, each.op, each.group) for each in build.collectives]
    assert found == [
        ("embedding", "all_reduce", "attn"),
        *layers,
        ("head", "all_gather", "attn"),
    ]
    assert build.fusible == [source for source, op, _ in layers if op == "all_reduce"]


def test_routed_tokens_send_fewer_bytes_than_all_tokens() -> None:
    sent = []
    for routes_tokens in (False, True):
        build = PlanningBuild(experts=8, data=8)
        build.routes_tokens = routes_tokens
        Qwen3MoeForCausalLM({**SMALL, "num_experts": 64}, build)
        planned = [PlannedCollective(each, 8) for each in build.collectives]
        sent.append(sum(each.sent_bytes_per_token for each in planned))
    exchanges = [(each.source, each.op, each.size) for each in build.collectives]
    assert exchanges == [(f"layers.{each}.mlp.gate", "exchange_tokens", 16) for each in range(2)]
    # The share of processes that have one of two different experts.
    share = 1 - (56 * 55) / (64 * 63)
    assert build.collectives[0].share == pytest.approx(share)
    row = 16 * 4
    assert sent == [2 * 2 * 7 * row, 2 * round(2 * 7 * row * share)]


def test_tokens_are_not_routed_to_engines_without_whole_experts() -> None:
    build = PlanningBuild(moe=2, experts=2, data=4)
    build.routes_tokens = True
    with pytest.raises(ValueError, match="--moe-tp-size"):
        Qwen3MoeForCausalLM(SMALL, build)


@pytest.mark.parametrize(("moe", "share"), [(1, 0.5), (2, 1.0)])
def test_processes_of_an_engine_add_up_the_results_of_routed_tokens(moe: int, share: float) -> None:
    build = PlanningBuild(attn=2, moe=moe, experts=4 // moe, data=2)
    build.routes_tokens = True
    Qwen3MoeForCausalLM({**SMALL, "num_experts": 4, "num_experts_per_tok": 4}, build)
    found = [(each.op, each.group) for each in build.collectives]
    exchange = [("exchange_tokens", "experts"), ("all_reduce", "engine")]
    assert found[1:4] == [("all_reduce", "attn"), *exchange]
    # All processes have an expert of each token. Each process sends a part of its engine's tokens.
    assert build.collectives[2].share == share


def test_a_norm_that_cannot_gather_tokens_is_refused() -> None:
    build = PlanningBuild(experts=2, data=2)
    specs = [
        ShardingSpec("norm", Replicated(), Replicated(), 16),
        ShardingSpec("mine", Replicated(), Partial(("experts",)), 16, takes_all_tokens=True),
    ]
    with pytest.raises(ValueError, match="norm -> mine"):
        compile_sharding(build, specs)


def test_attention_may_be_sharded_alone() -> None:
    build = PlanningBuild(attn=2)
    LlamaForCausalLM(SMALL, build)
    sources = [each.source for each in build.collectives]
    assert sources == ["embedding", "layers.0.attention.out", "layers.1.attention.out", "head"]


def test_norms_over_all_heads_add_up_two_sums() -> None:
    build = PlanningBuild(attn=2)
    Olmo2ForCausalLM(SMALL, build)
    sums = next(each for each in build.collectives if "squares" in each.source)
    assert (sums.op, sums.size, sums.dtype) == ("all_reduce", 2, "float32")


@pytest.mark.parametrize(
    ("sizes", "changes", "named"),
    [
        ({"attn": 3}, {}, "4 attention heads"),
        (
            {"attn": 4},
            {"num_attention_heads": 12, "num_key_value_heads": 3},
            r"model\.layers\.0\.self_attn\.k_proj: 3 heads",
        ),
        ({"dense": 5}, {}, r"model\.layers\.0\.mlp\.gate_proj: 24 features"),
        ({"experts": 4}, {}, "6 experts"),
        ({"moe": 5}, {}, r"model\.layers\.0\.mlp\.experts: 12 features"),
    ],
)
def test_sizes_that_cannot_be_divided_are_refused(
    sizes: dict[str, int], changes: dict[str, int], named: str
) -> None:
    is_moe = "moe" in sizes or "experts" in sizes
    family = Qwen3MoeForCausalLM if is_moe else LlamaForCausalLM
    with pytest.raises(ValueError, match=named) as refused:
        family({**SMALL, **changes}, PlanningBuild(**sizes))
    assert "\n" not in str(refused.value)


def test_sharding_without_a_collective_names_the_modules() -> None:
    chain = [
        ShardingSpec("a", Replicated(), Sharded("heads", "attn"), 8),
        ShardingSpec("b", Partial(("attn",)), Replicated(), 8),
    ]
    with pytest.raises(ValueError, match="a -> b"):
        compile_sharding(PlanningBuild(attn=2), chain)


def test_collective_that_no_layer_executes_is_refused() -> None:
    chain = [
        ShardingSpec("a", Replicated(), Partial(("attn",)), 8),
        ShardingSpec("b", Replicated(), Replicated(), 8),
    ]
    compile_sharding(PlanningBuild(), chain)
    with pytest.raises(ValueError, match="all_reduce"):
        compile_sharding(PlanningBuild(attn=2), chain)


def test_neighbors_hold_copies_of_key_heads() -> None:
    rows = torch.arange(6).view(6, 1)
    parts = [
        Shard(0, "attn", num_heads=2).take(rows, ParallelLayout.of(rank, attn=4).group)
        for rank in range(4)
    ]
    assert [part.flatten().tolist() for part in parts] == [[0, 1, 2]] * 2 + [[3, 4, 5]] * 2


def test_stacked_weights_are_divided_one_by_one() -> None:
    shard = StackedShard(((4, Shard(0, "attn")), (2, Shard(0, "attn"))))
    parts = [
        shard.take(torch.arange(6), ParallelLayout.of(rank, attn=2).group) for rank in range(2)
    ]
    assert [part.tolist() for part in parts] == [[0, 1, 4], [2, 3, 5]]


def test_last_process_holds_fewer_rows_of_the_vocabulary() -> None:
    shard = Shard(0, "attn", num_rows=5)
    parts = [
        shard.take(torch.arange(5), ParallelLayout.of(rank, attn=4).group) for rank in range(4)
    ]
    assert [part.tolist() for part in parts] == [[0, 1], [2, 3], [4], []]


def test_plan_of_a_start_has_the_collectives(
    tiny: Callable[..., Resolved], catalog: Catalog
) -> None:
    alone, memory, _ = plan_only(tiny(), catalog)
    plan, local_memory, _ = plan_only(tiny(tensor_parallel_size=2), catalog)
    assert alone.collectives == ()
    ops = [each.collective.op for each in plan.collectives]
    assert ops == ["all_reduce"] * 5 + ["all_gather"]
    assert [planned.backend for planned in plan.find("comm")] == ["torch", "torch"]
    assert 2 * local_memory["page_bytes"] == memory["page_bytes"]


def test_plan_shows_fused_collectives_and_their_kernel(
    tiny: Callable[..., Resolved], catalog: Catalog
) -> None:
    def fused(**settings: Any) -> list[int]:
        plan, *_ = plan_only(tiny(tensor_parallel_size=2, **settings), catalog)
        (planned,) = plan.find(FUSED_OP)
        assert planned.backend == "torch"
        assert planned.axis("max_num_tokens") == max(
            each.collective.max_fused_tokens for each in plan.collectives
        )
        return [each.collective.max_fused_tokens for each in plan.collectives]

    limit = 256  # --chunked-prefill-size; 512 KB are 2048 tokens
    assert fused(enable_allreduce_fusion=True) == [0, *4 * (limit,), 0]
    assert fused(enable_allreduce_fusion=True, comm_fusion_max_num_tokens=7) == [0, *4 * (7,), 0]
    plain, *_ = plan_only(tiny(tensor_parallel_size=2), catalog)
    assert plain.find(FUSED_OP) == ()


@pytest.mark.parametrize(
    ("quantization", "op"),
    [("fp8", f"{FUSED_OP}_fp8"), ("fp8-block", f"{FUSED_OP}_fp8_groups")],
)
def test_fused_collectives_quantize_for_fp8_layers(
    quantization: str, op: str, tiny: Callable[..., Resolved], catalog: Catalog
) -> None:
    settings = {
        "quantization": quantization,
        "enable_allreduce_fusion": True,
        "hf_overrides": {"intermediate_size": 256, "head_dim": 128},
    }
    resolved = tiny(tensor_parallel_size=2, enforce_eager=True, **settings)
    plan = plan_for(resolved, catalog, PlatformInfo("cuda", (9, 0)))
    assert [planned.backend for planned in plan.find(op)] == ["triton"]
    fused = [each.collective for each in plan.collectives if each.collective.max_fused_tokens]
    # The head reads the final norm unquantized.
    assert [each.fused_op for each in fused] == [op, op, op, FUSED_OP]
    assert op in kernel_table(plan)


def test_named_unquantized_kernel_is_used(tiny: Callable[..., Resolved], catalog: Catalog) -> None:
    resolved = tiny(
        tensor_parallel_size=2,
        enable_allreduce_fusion=True,
        quantization="fp8",
        kernel_backend={FUSED_OP: ("torch",)},
    )
    plan, *_ = plan_only(resolved, catalog)
    fused = [each.collective for each in plan.collectives if each.collective.max_fused_tokens]
    assert {each.fused_op for each in fused} == {FUSED_OP}
    assert plan.find(f"{FUSED_OP}_fp8") == ()


def test_gpus_select_the_fused_kernel(tiny: Callable[..., Resolved], catalog: Catalog) -> None:
    resolved = tiny(tensor_parallel_size=2, enable_allreduce_fusion=True, enforce_eager=True)
    (planned,) = plan_for(resolved, catalog, PlatformInfo("cuda", (9, 0))).find(FUSED_OP)
    assert planned.backend == "triton"
    (verdict,) = (each for each in planned.verdicts if each.backend == "torch")
    assert "device cuda" in verdict.reasons[0].what


@pytest.mark.parametrize(
    ("has_peer_access", "settings", "is_fused"),
    [
        (True, {}, True),
        (True, {"enable_allreduce_fusion": False}, False),
        (True, {"kernel_backend": {"all_reduce": ("symm",)}}, False),
        (True, {"comm_fusion_max_num_tokens": 8}, True),
        (True, {"hf_overrides": {"architectures": ["Olmo2ForCausalLM"], "head_dim": 16}}, False),
        (False, {}, False),
        (False, {"enable_allreduce_fusion": True}, True),
    ],
)
def test_gpus_that_address_each_other_fuse_by_default(
    has_peer_access: bool,
    settings: dict[str, Any],
    is_fused: bool,
    monkeypatch: pytest.MonkeyPatch,
    tiny: Callable[..., Resolved],
    catalog: Catalog,
) -> None:
    monkeypatch.setattr(
        "tokenspeed_core.worker.build.have_peer_access", lambda num: has_peer_access
    )
    resolved = tiny(tensor_parallel_size=2, enforce_eager=True, **settings)
    plan = plan_for(resolved, catalog, PlatformInfo("cuda", (9, 0)))
    assert bool(plan.find(FUSED_OP)) is is_fused
    assert any(each.collective.max_fused_tokens for each in plan.collectives) is is_fused
    if (
        not is_fused
        and settings.get("enable_allreduce_fusion") is None
        and "hf_overrides" not in settings
    ):
        assert plan.not_fused
        assert plan.not_fused in kernel_table(plan)


def test_fusion_without_a_norm_to_fuse_is_refused(
    tiny: Callable[..., Resolved], catalog: Catalog
) -> None:
    overrides = {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "head_dim": 16}
    resolved = tiny(tensor_parallel_size=2, enable_allreduce_fusion=True, hf_overrides=overrides)
    with pytest.raises(ConfigError, match="--enable-allreduce-fusion") as refused:
        plan_only(resolved, catalog)
    assert "\n" not in str(refused.value)
    resolved = tiny(tensor_parallel_size=2, comm_fusion_max_num_tokens=8)
    with pytest.raises(ConfigError, match=r"--comm-fusion-max-num-tokens.*two GPUs"):
        plan_only(resolved, catalog)


def test_start_refuses_heads_that_cannot_be_divided(
    tiny: Callable[..., Resolved], catalog: Catalog
) -> None:
    with pytest.raises(CheckpointError, match="2 KV heads") as refused:
        plan_only(tiny(tensor_parallel_size=3), catalog)
    assert "\n" not in str(refused.value)


def test_block_without_specs_is_named() -> None:
    class OddBlock:
        def sharding(self) -> Iterator[ShardingSpec]:
            yield from ()

    with pytest.raises(ValueError, match=r"OddBlock\.sharding yields no ShardingSpec"):
        list(bind_output(OddBlock().sharding(), lambda collective: None))
