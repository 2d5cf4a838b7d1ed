"""Op contracts of linear layers with integer weights: 4-bit weights (W4A16), 8-bit weights and activations (W8A8)."""

from __future__ import annotations

from tokenspeed_core.api import DOTS, OpContract, Tolerance
from tokenspeed_kernels.contracts.common import (
    CODED_EXPERTS,
    CODES,
    EXPERTS_AXES,
    LINEAR_AXES,
    NORM_AXES,
    REFERENCE,
    ROWS,
)

_INPUTS = "tokenspeed_kernels.integer_inputs"
_STEPS = tuple(
    Tolerance(dtype, 0.0, 1.0, "a value halfway between two integers may round to either")
    for dtype in ("float32", "bfloat16", "float16")
)
_EXPERTS_CASES = (
    {"num_experts": 6, "top_k": 2, "hidden_size": 48, "intermediate_size": 80},
    {"num_experts": 16, "top_k": 4, "hidden_size": 256, "intermediate_size": 384},
    {"num_experts": 5, "top_k": 2, "hidden_size": 40, "intermediate_size": 24},
)


def _static_experts(kind: str, dtype: str) -> OpContract:
    return OpContract(
        f"moe_experts_{kind}_static",
        "moe",
        f"(x [T, N], gate_up_input float32 [1], gate_up {dtype} [E, 2I, N], gate_up_scale float32 [E, 2I, 1], down_input "
        f"float32 [1], down {dtype} [E, N, I], down_scale float32 [E, N, 1], weights float32 [T, k], ids int32 [T, k]) -> "
        f"y [T, N]: as moe_experts_{kind}, with q = quantize_{kind}_static and the scale before each weight",
        EXPERTS_AXES,
        f"{REFERENCE}.moe_w8a8:moe_experts_{kind}_static",
        f"{_INPUTS}:moe_experts_{kind}_static",
        CODED_EXPERTS,
        rows=("x", "weights", "ids"),
        cases=_EXPERTS_CASES,
    )


W4A16 = (
    OpContract(
        "linear_w4a16",
        "linear",
        "(x [T, I], weight uint8 [O, I / 2], scale [O, I / G], zero uint8 [O, I / G] | None, order int32 [I] | None, "
        "bias [O] | None) -> y [T, O]: x @ value.T + bias, where value = (code - zero) * scale for groups of G columns, "
        "and zero is 8 without zero points. Codes are 0 to 15: byte 16 r + j of a row holds column 32 r + j in its low bits "
        "and column 32 r + 16 + j in its high bits. With `order`, column j of the weight multiplies column order[j] of x",
        {
            "in_size": "input features I, a multiple of G",
            "out_size": "output features O",
            "group_size": "columns G that share a scale, a multiple of 32; 0: all",
        },
        f"{REFERENCE}.w4a16:linear_w4a16",
        f"{_INPUTS}:linear_w4a16",
        DOTS,
        rows=("x",),
        cases=(
            {"in_size": 128, "out_size": 50, "group_size": 32},
            {"in_size": 384, "out_size": 256, "group_size": 128},
            {"in_size": 320, "out_size": 96, "group_size": 64},
            {"in_size": 288, "out_size": 130, "group_size": 0},
        ),
    ),
    OpContract(
        "linear_mxfp4",
        "linear",
        "(x [T, I], weight uint8 [O, I / 2], scale uint8 [O, I / 32], bias [O] | None) -> y [T, O]: as linear_w4a16 with "
        "E2M1 codes: value = e2m1(code) * 2^(scale - 127) for groups of 32 columns, in the same order of codes",
        {"in_size": "input features I, a multiple of 32", "out_size": "output features O"},
        f"{REFERENCE}.w4a16:linear_mxfp4",
        f"{_INPUTS}:linear_mxfp4",
        DOTS,
        rows=("x",),
        cases=(
            {"in_size": 128, "out_size": 50},
            {"in_size": 352, "out_size": 96},
        ),
    ),
    OpContract(
        "moe_experts_w4a16",
        "moe",
        "(x [T, N], gate_up uint8 [E, 2I, N / 2], gate_up_scale [E, 2I, N / G], gate_up_zero uint8 [E, 2I, N / G] | None, "
        "gate_up_order int32 [E, N] | None, down uint8 [E, N, I / 2], down_scale [E, N, I / G], down_zero | None, "
        "down_order int32 [E, I] | None, weights float32 [T, k], ids int32 [T, k]) -> y [T, N]: moe_experts with weights "
        "as in linear_w4a16; the hidden state is rounded to the dtype",
        {
            "num_experts": "experts E",
            "top_k": "experts per token, k",
            "hidden_size": "hidden size N, a multiple of G",
            "intermediate_size": "intermediate size I of an expert, a multiple of G",
            "group_size": "columns G that share a scale, a multiple of 32; 0: all",
        },
        f"{REFERENCE}.moe_w4a16:moe_experts_w4a16",
        f"{_INPUTS}:moe_experts_w4a16",
        DOTS,
        rows=("x", "weights", "ids"),
        cases=(
            {
                "num_experts": 6,
                "top_k": 2,
                "hidden_size": 64,
                "intermediate_size": 96,
                "group_size": 32,
            },
            {
                "num_experts": 16,
                "top_k": 4,
                "hidden_size": 256,
                "intermediate_size": 384,
                "group_size": 128,
            },
            {
                "num_experts": 5,
                "top_k": 2,
                "hidden_size": 96,
                "intermediate_size": 32,
                "group_size": 0,
            },
        ),
    ),
    OpContract(
        "moe_experts_mxfp4",
        "moe",
        "(x [T, N], gate_up uint8 [E, 2I, N / 2], gate_up_scale uint8 [E, 2I, N / 32], down uint8 [E, N, I / 2], "
        "down_scale uint8 [E, N, I / 32], weights float32 [T, k], ids int32 [T, k]) -> y [T, N]: moe_experts with weights "
        "as in linear_mxfp4; the hidden state is rounded to the dtype. N and I are multiples of 32",
        EXPERTS_AXES,
        f"{REFERENCE}.moe_w4a16:moe_experts_mxfp4",
        f"{_INPUTS}:moe_experts_mxfp4",
        DOTS,
        rows=("x", "weights", "ids"),
        cases=(
            {"num_experts": 6, "top_k": 2, "hidden_size": 64, "intermediate_size": 96},
            {"num_experts": 5, "top_k": 3, "hidden_size": 96, "intermediate_size": 32},
        ),
    ),
)

INT8 = (
    OpContract(
        "quantize_int8",
        "linear",
        "(x [T, N]) -> (y int8 [T, N], scale float32 [T, 1]): per-token scale = max(|row|, 1e-10) / 127, "
        "y = x / scale, rounded to the nearest, ties to even",
        NORM_AXES,
        f"{REFERENCE}.int8:quantize_int8",
        "tokenspeed_kernels.inputs:quantize_fp8",
        _STEPS,
        rows=("x",),
        cases=ROWS,
    ),
    OpContract(
        "quantize_int8_static",
        "linear",
        "(x [T, N], scale float32 [1]) -> (y int8 [T, N], scale float32 [T, 1]): y = x / scale, rounded to the nearest "
        "and limited to -128 and 127; the scale is repeated for each row",
        NORM_AXES,
        f"{REFERENCE}.int8:quantize_int8_static",
        f"{_INPUTS}:quantize_static",
        _STEPS,
        rows=("x",),
        cases=ROWS,
    ),
    OpContract(
        "linear_int8",
        "linear",
        "(x int8 [T, I], x_scale float32 [T, 1], weight int8 [O, I], weight_scale float32 [O, 1], bias [O] | None) -> "
        "y [T, O] of the dtype: (x @ weight.T) * x_scale * weight_scale.T + bias; sums are exact integers",
        LINEAR_AXES,
        f"{REFERENCE}.int8:linear_int8",
        f"{_INPUTS}:linear_int8",
        DOTS,
        rows=("x", "x_scale"),
        cases=(
            {"in_size": 96, "out_size": 48},
            {"in_size": 256, "out_size": 512},
            {"in_size": 100, "out_size": 50},
        ),
    ),
    OpContract(
        "moe_experts_int8",
        "moe",
        "(x [T, N], gate_up int8 [E, 2I, N], gate_up_scale float32 [E, 2I, 1], down int8 [E, N, I], down_scale float32 "
        "[E, N, 1], weights float32 [T, k], ids int32 [T, k]) -> y [T, N]: as moe_experts_fp8, with q = quantize_int8",
        EXPERTS_AXES,
        f"{REFERENCE}.moe_w8a8:moe_experts_int8",
        f"{_INPUTS}:moe_experts_int8",
        CODED_EXPERTS,
        rows=("x", "weights", "ids"),
        cases=_EXPERTS_CASES,
    ),
    _static_experts("int8", "int8"),
)

FP8_STATIC = (
    OpContract(
        "quantize_fp8_static",
        "linear",
        "(x [T, N], scale float32 [1]) -> (y float8_e4m3fn [T, N], scale float32 [T, 1]): y = x / scale, limited to "
        "-448 and 448, rounded; the scale is repeated for each row",
        NORM_AXES,
        f"{REFERENCE}.fp8:quantize_fp8_static",
        f"{_INPUTS}:quantize_static",
        CODES,
        rows=("x",),
        cases=ROWS,
    ),
    _static_experts("fp8", "float8_e4m3fn"),
)
