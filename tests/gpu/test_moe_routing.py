"""Router decisions on a device equal those of `torch.topk`, for tied scores too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenspeed_testing.conformance import check

from tokenspeed_kernels import descriptors
from tokenspeed_kernels.triton.moe.experts import moe_route

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ROUTING: dict[str, Any] = {
    "renormalize": True,
    "scale": 1.0,
    "num_groups": 1,
    "top_groups": 1,
    "group_score": "max",
    "dtype": "float32",
}


@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 2), (64, 6), (128, 8), (256, 8)])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_tied_scores_choose_the_experts_of_topk(score: str, num_experts: int, top_k: int) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(500, num_experts, generator=generator) * 2).round().cuda() / 2
    bias = torch.full((num_experts,), 0.5, device="cuda") if score == "sigmoid" else None
    axes = {"num_experts": num_experts, "top_k": top_k, "has_bias": bias is not None}
    _, ids = moe_route({**ROUTING, **axes, "score": score})(logits, bias)
    scores = logits.sigmoid() + bias if bias is not None else logits.softmax(dim=1)
    expected = scores.topk(top_k, dim=1).indices
    assert torch.equal(ids.long().sort(dim=1).values, expected.sort(dim=1).values)


def test_groups_of_deepseek_v3_conform() -> None:
    (spec,) = (spec for spec in descriptors.TRITON_MOE if spec.op == "moe_route")
    groups = {"num_groups": 8, "top_groups": 4, "group_score": "top_2_sum"}
    axes = {"num_experts": 256, "top_k": 8, "score": "sigmoid", "has_bias": True}
    case = {**ROUTING, **groups, **axes}
    assert check(spec, torch.device("cuda"), cases=[case], num_rows=(1, 300)) == 4
