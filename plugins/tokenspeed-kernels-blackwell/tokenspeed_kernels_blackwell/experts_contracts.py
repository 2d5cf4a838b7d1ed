"""The ops of experts whose weights and activations are block-scaled. Imports no tensor library."""

from __future__ import annotations

from tokenspeed_core.api import OpContract, Tolerance

_HERE = "tokenspeed_kernels_blackwell"
_AXES = {
    "num_experts": "experts E",
    "top_k": "experts a token goes to, k",
    "hidden_size": "features of a token, N, a multiple of 32",
    "intermediate_size": "features in an expert, I, a multiple of 32",
}
_CASES = (
    {"num_experts": 6, "top_k": 2, "hidden_size": 96, "intermediate_size": 64},
    {"num_experts": 6, "top_k": 2, "hidden_size": 128, "intermediate_size": 128},
    {"num_experts": 16, "top_k": 4, "hidden_size": 256, "intermediate_size": 384},
)


def _near(distance: float) -> tuple[Tolerance, ...]:
    source = "a hidden value near the middle of two codes may become either, which moves all of its token's sums"
    return tuple(
        Tolerance(dtype, relative, distance, source)
        for dtype, relative in (("float32", 2e-3), ("bfloat16", 1e-2), ("float16", 2e-3))
    )


EXPERTS = (
    OpContract(
        "moe_experts_mxfp8",
        "moe",
        "(x [T, N], gate_up float8_e4m3fn [E, 2I, N], gate_up_scale uint8 [E, 2I, N / 32], down float8_e4m3fn "
        "[E, N, I], down_scale uint8 [E, N, I / 32], weights float32 [T, k], ids int32 [T, k]) -> y [T, N]: the sum "
        "over a token's experts of weight * down @ q(silu_mul(gate_up @ q(x))), q being quantize_mxfp8 of a row; what "
        "lies between is float32",
        _AXES,
        f"{_HERE}.experts_reference:moe_experts_mxfp8",
        f"{_HERE}.experts_inputs:moe_experts_mxfp8",
        _near(0.04),
        rows=("x", "weights", "ids"),
        cases=_CASES,
    ),
    OpContract(
        "moe_experts_nvfp4",
        "moe",
        "(x [T, N], x_scale float32 [1], gate_up uint8 [E, 2I, N / 2], gate_up_scale float8_e4m3fn [E, 2I, N / 16], "
        "gate_up_factor float32 [E], hidden_scale float32 [1], down uint8 [E, N, I / 2], down_scale float8_e4m3fn "
        "[E, N, I / 16], down_factor float32 [E], weights float32 [T, k], ids int32 [T, k]) -> y [T, N]: as "
        "moe_experts_mxfp8, q being quantize_nvfp4 of a row under x_scale for x, under hidden_scale for what gate and "
        "up give; factors stand over all values of an expert's weight, gate and up sharing one",
        _AXES,
        f"{_HERE}.experts_reference:moe_experts_nvfp4",
        f"{_HERE}.experts_inputs:moe_experts_nvfp4",
        _near(0.1),
        rows=("x", "weights", "ids"),
        cases=_CASES,
    ),
)
