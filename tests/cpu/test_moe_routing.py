"""Router decisions and weights equal those of the routers in transformers, for tied scores too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Glm4MoeConfig,
    GptOssConfig,
    MiniMaxM2Config,
    MixtralConfig,
    Qwen3MoeConfig,
)
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2TopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from tokenspeed_kernels.reference.moe import moe_route
from tokenspeed_models.layers.moe import Router, SharedExperts
from tokenspeed_models.moe_config import RoutingConfig
from tokenspeed_models.testing import DenseBuild

HIDDEN = 16
SIZES = {"hidden_size": HIDDEN, "num_attention_heads": 4, "num_key_value_heads": 4}
GROUPED = {"n_group": 4, "topk_group": 2}
CASES: dict[str, tuple[Callable[[], Any], RoutingConfig]] = {
    "qwen3-moe": (
        lambda: Qwen3MoeTopKRouter(Qwen3MoeConfig(**SIZES, num_experts=12, num_experts_per_tok=3)),
        RoutingConfig(12, 3),
    ),
    "mixtral": (
        lambda: MixtralTopKRouter(
            MixtralConfig(**SIZES, num_local_experts=8, num_experts_per_tok=2)
        ),
        RoutingConfig(8, 2, renormalize=True),
    ),
    "gpt-oss": (
        lambda: GptOssTopKRouter(
            GptOssConfig(**SIZES, num_local_experts=32, num_experts_per_tok=4)
        ),
        RoutingConfig(32, 4, score="top_k_softmax"),
    ),
    "deepseek-v2-lite": (
        lambda: DeepseekV2TopkRouter(
            DeepseekV2Config(
                **SIZES,
                n_routed_experts=24,
                num_experts_per_tok=6,
                topk_method="greedy",
            )
        ),
        RoutingConfig(24, 6),
    ),
    "deepseek-v2": (
        lambda: DeepseekV2TopkRouter(
            DeepseekV2Config(
                **SIZES,
                n_routed_experts=24,
                num_experts_per_tok=4,
                topk_method="group_limited_greedy",
                routed_scaling_factor=16.0,
                **GROUPED,
            )
        ),
        RoutingConfig(24, 4, scale=16.0, num_groups=4, top_groups=2),
    ),
    "deepseek-v3": (
        lambda: DeepseekV3TopkRouter(
            DeepseekV3Config(
                **SIZES,
                n_routed_experts=24,
                num_experts_per_tok=4,
                routed_scaling_factor=2.5,
                **GROUPED,
            )
        ),
        RoutingConfig(
            24,
            4,
            score="sigmoid",
            renormalize=True,
            scale=2.5,
            num_groups=4,
            top_groups=2,
            group_score="top_2_sum",
            has_bias=True,
        ),
    ),
    "glm-4.5": (
        lambda: Glm4MoeTopkRouter(
            Glm4MoeConfig(
                **SIZES,
                n_routed_experts=16,
                num_experts_per_tok=3,
                norm_topk_prob=False,
            )
        ),
        RoutingConfig(16, 3, score="sigmoid", has_bias=True),
    ),
    "minimax-m2": (
        lambda: MiniMaxM2TopKRouter(
            MiniMaxM2Config(**SIZES, num_local_experts=16, num_experts_per_tok=4)
        ),
        RoutingConfig(16, 4, score="sigmoid", renormalize=True, has_bias=True),
    ),
}


class TopK(NamedTuple):
    """The result of `torch.topk`."""

    values: Tensor
    indices: Tensor


def stable_topk(values: Tensor, k: int, dim: int = -1, **_: bool) -> TopK:
    """Return the k largest, the lower index first among equals, as `torch.topk` does on CUDA only."""
    ordered = torch.sort(values, dim=dim, descending=True, stable=True)
    return TopK(ordered.values.narrow(dim, 0, k), ordered.indices.narrow(dim, 0, k))


@pytest.mark.parametrize("has_ties", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_decisions_equal_transformers(
    case: str, has_ties: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_router, routing = CASES[case]
    torch.manual_seed(5)
    router = make_router()
    for parameter in router.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(200, HIDDEN)
    bias = torch.randn(routing.num_experts) / 4 if routing.has_bias else None
    if has_ties:  # whole numbers have few different products
        x.round_()
        for values in (router.weight.data, *(() if bias is None else (bias,))):
            values.round_()
        if bias is not None:
            bias[::2] = 0.5
        monkeypatch.setattr(torch, "topk", stable_topk)
        monkeypatch.setattr(Tensor, "topk", stable_topk)
    arguments = (bias,) if case == "minimax-m2" else ()
    if bias is not None and not arguments:
        router.e_score_correction_bias.copy_(bias)
    with torch.no_grad():
        logits, weights, ids = router(x, *arguments)
    found_weights, found_ids = moe_route({**asdict(routing), "dtype": "float32"})(logits, bias)
    order, found_order = ids.sort(dim=1), found_ids.long().sort(dim=1)
    assert torch.equal(found_order.values, order.values)
    torch.testing.assert_close(
        found_weights.gather(1, found_order.indices), weights.gather(1, order.indices)
    )


def test_choice_depends_on_the_bias_and_weights_do_not() -> None:
    routing = RoutingConfig(4, 2, score="sigmoid", has_bias=True)
    route = moe_route({**asdict(routing), "dtype": "float32"})
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    weights, ids = route(logits, torch.tensor([0.0, 0.0, 5.0, 4.0]))
    assert ids.tolist() == [[2, 3]]
    torch.testing.assert_close(weights, torch.tensor([[1.0, 0.0]]).sigmoid())


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"top_k": 9}, "num_experts_per_tok is 9, expected at most 8"),
        ({"top_k": 3, "num_groups": 4}, "expected at most 2"),
        ({"num_groups": 3}, "3 groups of 8 experts"),
        ({"num_groups": 2, "top_groups": 4}, "4 of 2 groups"),
    ],
)
def test_impossible_choices_are_refused(changes: dict[str, int], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        RoutingConfig(**{"num_experts": 8, "top_k": 2, **changes})


def test_gated_shared_experts_match_the_formula() -> None:
    torch.manual_seed(0)
    shared = SharedExperts(DenseBuild(), 8, 6, is_gated=True)
    for slot in shared.slots(""):
        slot.target.normal_()
    x = torch.randn(5, 8)
    gate, up = (x @ shared.gate_up.weight.T).chunk(2, dim=1)
    mlp = (torch.nn.functional.silu(gate) * up) @ shared.down.weight.T
    assert shared.output_gate is not None
    expected = (x @ shared.output_gate.weight.T).sigmoid() * mlp
    torch.testing.assert_close(shared(x), expected)
    assert [slot.name for slot in shared.slots("mlp.")] == [
        "mlp.shared_experts.gate_proj.weight",
        "mlp.shared_experts.up_proj.weight",
        "mlp.shared_experts.down_proj.weight",
        "mlp.shared_expert_gate.weight",
    ]


def test_wide_router_computes_in_float32() -> None:
    torch.manual_seed(0)
    routing = RoutingConfig(6, 2, score="sigmoid", renormalize=True, has_bias=True)
    router = Router(DenseBuild(torch.bfloat16), 8, routing, is_wide=True)
    slots = {slot.name: slot.target.normal_() for slot in router.slots("mlp.")}
    x = torch.randn(5, 8).to(torch.bfloat16)
    weights, ids = router(x)
    logits = x.float() @ slots["mlp.gate.weight"].T
    bias = slots["mlp.gate.e_score_correction_bias"]
    expected = moe_route({**asdict(routing), "dtype": "float32"})(logits, bias)
    assert torch.equal(ids, expected[1])
    torch.testing.assert_close(weights, expected[0])
