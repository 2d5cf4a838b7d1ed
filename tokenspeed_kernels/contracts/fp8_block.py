"""Contracts of FP8 ops with block-wise scales."""

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
)

_FP8_PRODUCTS = (
    Tolerance("float32", 2e-3, 5e-3, "FP8 tensor cores accumulate with about 14 bits"),
    *(each for each in DOTS if each.dtype != "float32"),
)

_GROUPED_ROWS = ({"size": 64}, {"size": 256}, {"size": 1100})
FP8_BLOCK = (
    OpContract(
        "quantize_fp8_groups",
        "linear",
        "(x [T, N]) -> (y float8_e4m3fn [T, N], scale float32 [T, ceil(N / 128)]): one scale per 128 elements of a row, "
        "max(|group|, 1e-10) / 448; y = x / scale, rounded",
        {"size": "row size N"},
        f"{REFERENCE}.fp8_block:quantize_fp8_groups",
        f"{INPUTS}:quantize_fp8",
        CODES,
        rows=("x",),
        cases=_GROUPED_ROWS,
    ),
    OpContract(
        "add_rms_norm_fp8_groups",
        "norm",
        "(x [T, N], residual [T, N], weight [N], eps) -> (y float8_e4m3fn [T, N], scale float32 [T, ceil(N / 128)], "
        "residual): residual += x; y, scale = quantize_fp8_groups(rms_norm(residual))",
        NORM_AXES,
        f"{REFERENCE}.fp8_block:add_rms_norm_fp8_groups",
        f"{INPUTS}:add_rms_norm",
        CODES,
        mutates=("residual",),
        rows=("x", "residual"),
        parts=("add_rms_norm", "quantize_fp8_groups"),
        cases=_GROUPED_ROWS,
    ),
    OpContract(
        "silu_mul_fp8_groups",
        "activation",
        "(x [T, 2N]) -> (y float8_e4m3fn [T, N], scale float32 [T, ceil(N / 128)]): quantize_fp8_groups(silu_mul(x))",
        {"size": "row size N of the result"},
        f"{REFERENCE}.fp8_block:silu_mul_fp8_groups",
        f"{INPUTS}:silu_mul",
        CODES,
        rows=("x",),
        parts=("silu_mul", "quantize_fp8_groups"),
        cases=_GROUPED_ROWS,
    ),
    OpContract(
        "quantize_fp8_blocks",
        "linear",
        "(weight [O, N]) -> (y float8_e4m3fn [O, N], scale float32 [ceil(O / 128), ceil(N / 128)]): as "
        "quantize_fp8_groups, with one scale per 128 x 128 block",
        {"size": "row size N"},
        f"{REFERENCE}.fp8_block:quantize_fp8_blocks",
        f"{INPUTS}:quantize_fp8_blocks",
        CODES,
        cases=({"size": 64}, {"size": 256}, {"size": 300}),
    ),
    OpContract(
        "linear_fp8_block",
        "linear",
        "(x float8_e4m3fn [T, I], x_scale float32 [T, ceil(I / 128)], weight float8_e4m3fn [O, I], weight_scale "
        "float32 [ceil(O / 128), ceil(I / 128)], bias [O] | None) -> y [T, O] of the dtype; block-wise scales, 1 x 128 "
        "for x and 128 x 128 for the weight",
        LINEAR_AXES,
        f"{REFERENCE}.fp8_block:linear_fp8_block",
        f"{INPUTS}:linear_fp8_block",
        _FP8_PRODUCTS,
        rows=("x", "x_scale"),
        cases=(
            {"in_size": 512, "out_size": 384},
            {"in_size": 128, "out_size": 128},
            {"in_size": 208, "out_size": 48},
        ),
    ),
    OpContract(
        "moe_experts_fp8_block",
        "moe",
        "(x [T, N], gate_up float8_e4m3fn [E, 2I, N], gate_up_scale float32 [E, 2I / 128, ceil(N / 128)], "
        "down float8_e4m3fn [E, N, I], down_scale float32 [E, ceil(N / 128), I / 128], weights float32 [T, k], "
        "ids int32 [T, k]) -> y [T, N]: as moe_experts_fp8, with block-wise scales and q = quantize_fp8_groups; I is a "
        "multiple of 128",
        EXPERTS_AXES,
        f"{REFERENCE}.moe_w8a8:moe_experts_fp8_block",
        f"{INPUTS}:moe_experts_fp8_block",
        CODED_EXPERTS,
        rows=("x", "weights", "ids"),
        cases=(
            {"num_experts": 6, "top_k": 2, "hidden_size": 144, "intermediate_size": 128},
            {"num_experts": 16, "top_k": 4, "hidden_size": 256, "intermediate_size": 384},
        ),
    ),
)
