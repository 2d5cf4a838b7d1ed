"""Contracts of the ops of experts with biases and a clamped SwiGLU (gpt-oss, arXiv:2508.10925)."""

from __future__ import annotations

from tokenspeed_core.api import DOTS, OpContract
from tokenspeed_kernels.contracts.common import EXPERTS_AXES, REFERENCE

_REFERENCE = f"{REFERENCE}.biased_experts"
_INPUTS = "tokenspeed_kernels.biased_experts_inputs"
_AXES = {
    **EXPERTS_AXES,
    "alpha": "factor a of the gate in the sigmoid",
    "limit": "bound c of gate and up",
}
_RESULT = (
    "weights float32 [T, k], ids int32 [T, k]) -> y [T, N]: sum over a token's experts of weight * (down @ h + "
    "down_bias), where h = (u + 1) * g * sigmoid(a * g), g and u are the even and odd rows of gate_up @ x + "
    "gate_up_bias, g at most c, u between -c and c. An id of E means no expert. Weights of experts are contiguous"
)
_SWIGLU, _NARROW = {"alpha": 1.702, "limit": 7.0}, {"alpha": 1.0, "limit": 1.0}

BIASED_EXPERTS = (
    OpContract(
        "moe_biased_experts",
        "moe",
        "(x [T, N], gate_up [E, 2I, N], gate_up_bias [E, 2I], down [E, N, I], down_bias [E, N], "
        + _RESULT,
        _AXES,
        f"{_REFERENCE}:moe_biased_experts",
        f"{_INPUTS}:moe_biased_experts",
        DOTS,
        rows=("x", "weights", "ids"),
        cases=(
            {"num_experts": 6, "top_k": 2, "hidden_size": 40, "intermediate_size": 24, **_SWIGLU},
            {"num_experts": 5, "top_k": 3, "hidden_size": 72, "intermediate_size": 40, **_NARROW},
        ),
    ),
    OpContract(
        "moe_biased_experts_mxfp4",
        "moe",
        "(x [T, N], gate_up uint8 [E, 2I, N / 2], gate_up_scale uint8 [E, 2I, N / 32], gate_up_bias [E, 2I], down uint8 "
        "[E, N, I / 2], down_scale uint8 [E, N, I / 32], down_bias [E, N], "
        + _RESULT
        + ". A byte has the E2M1 codes of two adjacent values, the first in its low bits; a scale is 2^(byte - 127). "
        "N and I are multiples of 32",
        _AXES,
        f"{_REFERENCE}:moe_biased_experts_mxfp4",
        f"{_INPUTS}:moe_biased_experts_mxfp4",
        DOTS,
        rows=("x", "weights", "ids"),
        cases=(
            {"num_experts": 6, "top_k": 2, "hidden_size": 96, "intermediate_size": 32, **_SWIGLU},
            {"num_experts": 5, "top_k": 3, "hidden_size": 64, "intermediate_size": 64, **_NARROW},
        ),
    ),
)
