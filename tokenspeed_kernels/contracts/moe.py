"""Contracts of mixtures of experts without quantization."""

from __future__ import annotations

from tokenspeed_core.api import DOTS, OpContract
from tokenspeed_kernels.contracts.common import EXPERTS_AXES, INPUTS, MOE_AXES, REFERENCE, ROUNDING

_ROUTING = {
    **MOE_AXES,
    "score": "softmax or sigmoid of the logits, or top_k_softmax: the logits, with a softmax over the chosen k",
    "renormalize": "whether the weights of a token are divided by their sum",
    "scale": "factor of the weights",
    "num_groups": "groups of consecutive experts of equal size",
    "top_groups": "groups from which a token may choose experts",
    "group_score": "score of a group: max, or top_2_sum (the sum of its two largest scores)",
    "has_bias": "whether a bias is added to the scores for the choice",
}
_SOFTMAX = {
    "score": "softmax",
    "renormalize": False,
    "scale": 1.0,
    "num_groups": 1,
    "top_groups": 1,
    "group_score": "max",
    "has_bias": False,
}
_SIGMOID = {
    **_SOFTMAX,
    "score": "sigmoid",
    "renormalize": True,
    "scale": 2.5,
    "has_bias": True,
}

MOE = (
    OpContract(
        "moe_route",
        "moe",
        "(logits [T, E], bias float32 [E], or None without has_bias) -> (weights float32 [T, k], ids int32 [T, k]), computed in float32: "
        "the k experts with the largest score + bias in the top_groups best groups, in descending order, the lower id "
        "first among equals; groups are ranked in the same way; weights are the scores of the chosen, without bias",
        _ROUTING,
        f"{REFERENCE}.moe:moe_route",
        f"{INPUTS}:moe_route",
        ROUNDING,
        rows=("logits",),
        cases=(
            {"num_experts": 12, "top_k": 3, **_SOFTMAX},
            {"num_experts": 128, "top_k": 8, **_SOFTMAX, "renormalize": True},
            {"num_experts": 32, "top_k": 4, **_SOFTMAX, "score": "top_k_softmax"},
            {"num_experts": 40, "top_k": 3, **_SOFTMAX, "num_groups": 5, "top_groups": 2},
            {"num_experts": 24, "top_k": 5, **_SIGMOID},
            {
                "num_experts": 96,
                "top_k": 5,
                **_SIGMOID,
                "num_groups": 8,
                "top_groups": 3,  # odd, so that one of two tied groups is chosen
                "group_score": "top_2_sum",
            },
        ),
    ),
    OpContract(
        "moe_logits",
        "moe",
        "(x [T, N], weight float32 [E, N]) -> y float32 [T, E]: x @ weight.T in float32",
        {"num_experts": "experts E", "hidden_size": "hidden size N"},
        f"{REFERENCE}.moe:moe_logits",
        f"{INPUTS}:moe_logits",
        ROUNDING,
        rows=("x",),
        cases=(
            {"num_experts": 12, "hidden_size": 40},
            {"num_experts": 64, "hidden_size": 256},
        ),
    ),
    OpContract(
        "moe_experts",
        "moe",
        "(x [T, N], gate_up [E, 2I, N], down [E, N, I], weights float32 [T, k], ids int32 [T, k]) "
        "-> y [T, N]: sum over a token's experts of weight * down @ silu_mul(gate_up @ x). An id of E means no expert",
        EXPERTS_AXES,
        f"{REFERENCE}.moe:moe_experts",
        f"{INPUTS}:moe_experts",
        DOTS,
        rows=("x", "weights", "ids"),
        weights=("gate_up", "down"),
        cases=(
            {"num_experts": 6, "top_k": 2, "hidden_size": 40, "intermediate_size": 24},
            {"num_experts": 16, "top_k": 4, "hidden_size": 128, "intermediate_size": 96},
        ),
    ),
)
