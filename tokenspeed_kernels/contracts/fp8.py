"""Contracts of FP8 ops with per-token and per-channel scales."""

from __future__ import annotations

from tokenspeed_core.api import DOTS, OpContract, Tolerance
from tokenspeed_kernels.contracts.common import (
    CODED_EXPERTS,
    CODES,
    EXPERTS_AXES,
    INPUTS,
    LINEAR_AXES,
    NORM_AXES,
    REFERENCE,
    ROWS,
)

_CODED_DOTS = tuple(
    Tolerance(
        dtype, 5e-2, 0.25, "values halfway between two e4m3 codes, 1/8 apart, may round to either"
    )
    for dtype in ("float32", "bfloat16", "float16")
)

_LINEAR_FP8_CASES = (
    {"in_size": 96, "out_size": 48},
    {"in_size": 256, "out_size": 512},
    {"in_size": 100, "out_size": 50},
)

FP8 = (
    OpContract(
        "quantize_fp8",
        "linear",
        "(x [T, N]) -> (y float8_e4m3fn [T, N], scale float32 [T, 1]): per-token scale = max(|row|, 1e-10) / 448, "
        "y = x / scale, rounded",
        {"size": "row size N"},
        f"{REFERENCE}.fp8:quantize_fp8",
        f"{INPUTS}:quantize_fp8",
        CODES,
        rows=("x",),
        cases=ROWS,
    ),
    OpContract(
        "add_rms_norm_fp8",
        "norm",
        "(x [T, N], residual [T, N], weight [N], eps) -> (y float8_e4m3fn [T, N], scale float32 [T, 1], residual): "
        "residual += x; y, scale = quantize_fp8(rms_norm(residual))",
        NORM_AXES,
        f"{REFERENCE}.fp8:add_rms_norm_fp8",
        f"{INPUTS}:add_rms_norm",
        CODES,
        mutates=("residual",),
        rows=("x", "residual"),
        parts=("add_rms_norm", "quantize_fp8"),
        cases=ROWS,
    ),
    OpContract(
        "silu_mul_fp8",
        "activation",
        "(x [T, 2N]) -> (y float8_e4m3fn [T, N], scale float32 [T, 1]): quantize_fp8(silu_mul(x))",
        {"size": "row size N of the result"},
        f"{REFERENCE}.fp8:silu_mul_fp8",
        f"{INPUTS}:silu_mul",
        CODES,
        rows=("x",),
        parts=("silu_mul", "quantize_fp8"),
        cases=ROWS,
    ),
    OpContract(
        "linear_fp8",
        "linear",
        "(x float8_e4m3fn [T, I], x_scale float32 [T, 1], weight float8_e4m3fn [O, I], weight_scale float32 [O, 1], "
        "bias [O] | None) -> y [T, O] of the dtype: (x * x_scale) @ (weight * weight_scale).T + bias",
        LINEAR_AXES,
        f"{REFERENCE}.fp8:linear_fp8",
        f"{INPUTS}:linear_fp8",
        DOTS,
        rows=("x", "x_scale"),
        cases=_LINEAR_FP8_CASES,
    ),
    OpContract(
        "quantize_linear_fp8",
        "linear",
        "(x [T, I], weight float8_e4m3fn [O, I], weight_scale float32 [O, 1], bias [O] | None) -> y [T, O]: "
        "linear_fp8 of quantize_fp8(x)",
        LINEAR_AXES,
        f"{REFERENCE}.fp8:quantize_linear_fp8",
        f"{INPUTS}:quantize_linear_fp8",
        _CODED_DOTS,
        rows=("x",),
        parts=("quantize_fp8", "linear_fp8"),
        cases=_LINEAR_FP8_CASES,
    ),
    OpContract(
        "add_rms_norm_linear_fp8",
        "linear",
        "(x [T, I], residual [T, I], norm_weight [I], eps, weight float8_e4m3fn [O, I], weight_scale float32 [O, 1], "
        "bias [O] | None) -> (y [T, O], total [T, I]): total = x + residual, a new tensor; "
        "y = quantize_linear_fp8(rms_norm(total))",
        LINEAR_AXES,
        f"{REFERENCE}.fp8:add_rms_norm_linear_fp8",
        f"{INPUTS}:add_rms_norm_linear_fp8",
        _CODED_DOTS,
        rows=("x", "residual"),
        parts=("add_rms_norm_fp8", "linear_fp8"),
        cases=_LINEAR_FP8_CASES,
    ),
    OpContract(
        "add_rms_norm_mlp_fp8",
        "linear",
        "(x [T, N], residual [T, N], norm_weight [N], eps, gate_up float8_e4m3fn [2I, N], "
        "gate_up_scale float32 [2I, 1], gate_up_bias [2I] | None, down float8_e4m3fn [N, I], "
        "down_scale float32 [N, 1], down_bias [N] | None) -> "
        "(y [T, N], total [T, N]): total = x + residual, a new tensor; y = MLP of rms_norm(total): "
        "quantize_linear_fp8(gate_up), silu_mul, quantize_linear_fp8(down)",
        {"hidden_size": "hidden size N", "size": "intermediate size I"},
        f"{REFERENCE}.fp8:add_rms_norm_mlp_fp8",
        f"{INPUTS}:add_rms_norm_mlp_fp8",
        _CODED_DOTS,
        rows=("x", "residual"),
        parts=("add_rms_norm_fp8", "linear_fp8", "silu_mul_fp8", "linear_fp8"),
        cases=({"hidden_size": 96, "size": 48}, {"hidden_size": 256, "size": 512}),
    ),
    OpContract(
        "moe_experts_fp8",
        "moe",
        "(x [T, N], gate_up float8_e4m3fn [E, 2I, N], gate_up_scale float32 [E, 2I, 1], down float8_e4m3fn [E, N, I], "
        "down_scale float32 [E, N, 1], weights float32 [T, k], ids int32 [T, k]) -> y [T, N]: sum over a token's "
        "experts of weight * down @ q(silu_mul(gate_up @ q(x))), where q is quantize_fp8; sums are float32, inputs of "
        "q are rounded to the dtype. An id of E means no expert",
        EXPERTS_AXES,
        f"{REFERENCE}.moe_w8a8:moe_experts_fp8",
        f"{INPUTS}:moe_experts_fp8",
        CODED_EXPERTS,
        rows=("x", "weights", "ids"),
        cases=(
            {"num_experts": 6, "top_k": 2, "hidden_size": 48, "intermediate_size": 80},
            {"num_experts": 16, "top_k": 4, "hidden_size": 256, "intermediate_size": 384},
            {"num_experts": 5, "top_k": 2, "hidden_size": 40, "intermediate_size": 24},
        ),
    ),
)
