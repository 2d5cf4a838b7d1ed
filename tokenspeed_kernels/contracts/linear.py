"""Contracts of activations, linear layers and fused decoder blocks, without quantization."""

from __future__ import annotations

from tokenspeed_core.api import DOTS, OpContract
from tokenspeed_kernels.contracts.common import INPUTS, LINEAR_AXES, REFERENCE, ROUNDING

_LINEAR_CASES = ({"in_size": 96, "out_size": 50}, {"in_size": 256, "out_size": 512})

_FUSED_BLOCK = {
    "in_size": "attention output features I",
    "hidden_size": "hidden size H",
    "intermediate_size": "MLP intermediate size M",
    "out_size": "output features of the QKV projection, O",
}

DENSE = (
    OpContract(
        "silu_mul",
        "activation",
        "(x [T, 2N]) -> y [T, N]: silu(first half) * second half",
        {"size": "row size N of the result"},
        f"{REFERENCE}.activation:silu_mul",
        f"{INPUTS}:silu_mul",
        ROUNDING,
        rows=("x",),
        cases=({"size": 100}, {"size": 1536}),
    ),
    OpContract(
        "gelu_tanh_mul",
        "activation",
        "(x [T, 2N]) -> y [T, N]: gelu(first half), by its tanh approximation, * second half",
        {"size": "row size N of the result"},
        f"{REFERENCE}.activation:gelu_tanh_mul",
        f"{INPUTS}:silu_mul",
        ROUNDING,
        rows=("x",),
        cases=({"size": 100}, {"size": 1536}),
    ),
    OpContract(
        "linear",
        "linear",
        "(x [T, I], weight [O, I], bias [O] | None) -> y [T, O]",
        LINEAR_AXES,
        f"{REFERENCE}.linear:linear",
        f"{INPUTS}:linear",
        DOTS,
        rows=("x",),
        cases=_LINEAR_CASES,
    ),
    OpContract(
        "linear_silu_mul",
        "linear",
        "(x [T, I], weight [2O, I]) -> y [T, O]: linear without a bias, followed by silu_mul",
        LINEAR_AXES,
        f"{REFERENCE}.fused_linear:linear_silu_mul",
        f"{INPUTS}:linear_silu_mul",
        DOTS,
        rows=("x",),
        parts=("linear", "silu_mul"),
        cases=_LINEAR_CASES,
    ),
    OpContract(
        "linear_add",
        "linear",
        "(x [T, I], weight [O, I], total [T, O]) -> None: adds linear(x), without a bias, to total",
        LINEAR_AXES,
        f"{REFERENCE}.fused_linear:linear_add",
        f"{INPUTS}:linear_add",
        DOTS,
        mutates=("total",),
        rows=("x", "total"),
        parts=("linear",),
        cases=_LINEAR_CASES,
    ),
    OpContract(
        "add_rms_norm_linear",
        "linear",
        "(x [T, I], residual [T, I], norm_weight [I], eps: float, weight [O, I], bias [O] | None) -> (y [T, O], "
        "total [T, I]): total = x + residual, a new tensor; y = linear(rms_norm(total))",
        LINEAR_AXES,
        f"{REFERENCE}.fused_linear:add_rms_norm_linear",
        f"{INPUTS}:add_rms_norm_linear",
        DOTS,
        rows=("x", "residual"),
        parts=("add_rms_norm", "linear"),
        cases=_LINEAR_CASES,
    ),
    OpContract(
        "add_rms_norm_linear_silu_mul",
        "linear",
        "(x [T, I], residual [T, I], norm_weight [I], eps: float, weight [2O, I], bias [2O] | None) -> (y [T, O], "
        "total [T, I]): as add_rms_norm_linear, followed by silu_mul",
        LINEAR_AXES,
        f"{REFERENCE}.fused_linear:add_rms_norm_linear_silu_mul",
        f"{INPUTS}:add_rms_norm_linear_silu_mul",
        DOTS,
        rows=("x", "residual"),
        parts=("add_rms_norm", "linear", "silu_mul"),
        cases=_LINEAR_CASES,
    ),
    OpContract(
        "add_rms_norm_linear_gelu_tanh_mul",
        "linear",
        "(x [T, I], residual [T, I], norm_weight [I], eps: float, weight [2O, I], bias [2O] | None) -> (y [T, O], "
        "total [T, I]): as add_rms_norm_linear, followed by gelu_tanh_mul",
        LINEAR_AXES,
        f"{REFERENCE}.fused_linear:add_rms_norm_linear_gelu_tanh_mul",
        f"{INPUTS}:add_rms_norm_linear_silu_mul",
        DOTS,
        rows=("x", "residual"),
        parts=("add_rms_norm", "linear", "gelu_tanh_mul"),
        cases=_LINEAR_CASES,
    ),
    OpContract(
        "fused_block",
        "linear",
        "(x [T, I], residual [T, H], out [H, I], norm_weight [H], gate_up [2M, H], down [H, M], next_norm_weight [H], "
        "qkv [O, H], eps: float) -> (y [T, O], total [T, H]), for T <= max_rows: linear(out), "
        "add_rms_norm_linear_silu_mul(gate_up), linear(down), add_rms_norm_linear(qkv), without biases",
        {**_FUSED_BLOCK, "max_rows": "largest number of rows"},
        f"{REFERENCE}.fused_linear:fused_block",
        f"{INPUTS}:fused_block",
        DOTS,
        rows=("x", "residual"),
        parts=("linear", "add_rms_norm_linear_silu_mul", "linear", "add_rms_norm_linear"),
        cases=(
            {
                "in_size": 128,
                "hidden_size": 64,
                "intermediate_size": 192,
                "out_size": 256,
                "max_rows": 64,
            },
            {
                "in_size": 512,
                "hidden_size": 320,
                "intermediate_size": 448,
                "out_size": 640,
                "max_rows": 64,
            },
        ),
    ),
    OpContract(
        "fused_block_in_place",
        "linear",
        "as fused_block, for T >= min_rows; updates residual in place and returns it as total",
        {**_FUSED_BLOCK, "min_rows": "smallest number of rows"},
        f"{REFERENCE}.fused_linear:fused_block_in_place",
        f"{INPUTS}:fused_block",
        DOTS,
        mutates=("residual",),
        rows=("x", "residual"),
        parts=("linear", "add_rms_norm_linear_silu_mul", "linear", "add_rms_norm_linear"),
        cases=(
            {
                "in_size": 128,
                "hidden_size": 64,
                "intermediate_size": 192,
                "out_size": 256,
                "min_rows": 512,
            },
            {
                "in_size": 512,
                "hidden_size": 320,
                "intermediate_size": 448,
                "out_size": 640,
                "min_rows": 4096,
            },
        ),
    ),
)
