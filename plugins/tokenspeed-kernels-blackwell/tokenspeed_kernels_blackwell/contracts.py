"""Op contracts of this distribution, and the quantization methods that use them. Imports no tensor library."""

from __future__ import annotations

from tokenspeed_core.api import DOTS, EXACT, OpContract, Quantization, QuantizationScheme, Tolerance

_REFERENCE, _INPUTS = (
    "tokenspeed_kernels_blackwell.linear.reference",
    "tokenspeed_kernels_blackwell.linear.inputs",
)
_ROWS = {"size": "row size N, a multiple of 32"}
_SIZES = {"in_size": "input features I, a multiple of 32", "out_size": "output features O"}
_CASES = (
    {"in_size": 128, "out_size": 48},
    {"in_size": 384, "out_size": 200},
    {"in_size": 256, "out_size": 130},
)
_DTYPES = ("float32", "bfloat16", "float16")

BLOCK_SCALED = (
    OpContract(
        "quantize_mxfp8",
        "linear",
        "(x [T, N]) -> (y float8_e4m3fn [T, N], scale uint8 [T, N / 32]): 32 elements share the scale 2^(scale - 127), "
        "the smallest power of two with max(|group|) / scale <= 448; y = x / scale, rounded",
        _ROWS,
        f"{_REFERENCE}:quantize_mxfp8",
        f"{_INPUTS}:quantize_mxfp8",
        EXACT,
        rows=("x",),
        cases=({"size": 64}, {"size": 1024}),
    ),
    OpContract(
        "linear_mxfp8",
        "linear",
        "(x float8_e4m3fn [T, I], x_scale uint8 [T, I / 32], weight float8_e4m3fn [O, I], weight_scale uint8 "
        "[O, I / 32], bias [O] | None) -> y [T, O] of the dtype; scales as from quantize_mxfp8",
        _SIZES,
        f"{_REFERENCE}:linear_mxfp8",
        f"{_INPUTS}:linear_mxfp8",
        DOTS,
        rows=("x", "x_scale"),
        cases=_CASES,
    ),
    OpContract(
        "quantize_nvfp4",
        "linear",
        "(x [T, N], scale float32 [1]) -> (y uint8 [T, N / 2], group_scale float8_e4m3fn [T, N / 16]): 16 elements share "
        "group_scale * scale, where group_scale = max(|group|) / 6 / scale, rounded to e4m3; y = x / (group_scale * "
        "scale), rounded to e2m1, two values per byte, the first in the low bits",
        _ROWS,
        f"{_REFERENCE}:quantize_nvfp4",
        f"{_INPUTS}:quantize_nvfp4",
        EXACT,
        rows=("x",),
        cases=({"size": 64}, {"size": 1024}),
    ),
    OpContract(
        "linear_nvfp4",
        "linear",
        "(x uint8 [T, I / 2], x_scale float8_e4m3fn [T, I / 16], weight uint8 [O, I / 2], weight_scale float8_e4m3fn "
        "[O, I / 16], scale float32 [1], bias [O] | None) -> y [T, O] of the dtype; operands as from quantize_nvfp4, "
        "scale is the product of both per-tensor scales",
        _SIZES,
        f"{_REFERENCE}:linear_nvfp4",
        f"{_INPUTS}:linear_nvfp4",
        DOTS,
        rows=("x", "x_scale"),
        cases=_CASES,
    ),
)
MXFP8 = QuantizationScheme(
    name="mxfp8",
    dtype="float8_e4m3fn",
    quantize="quantize_mxfp8",
    linear="linear_mxfp8",
    scale_block=(1, 32),
    scale_dtype="uint8",
    fused={"moe_experts": "moe_experts_mxfp8"},
)
NVFP4 = QuantizationScheme(
    name="nvfp4",
    dtype="uint8",
    quantize="quantize_nvfp4",
    linear="linear_nvfp4",
    scale_block=(1, 16),
    scale_dtype="float8_e4m3fn",
    values_per_element=2,
    has_tensor_scales=True,
    fused={"moe_experts": "moe_experts_nvfp4"},
)
_READ = "tokenspeed_kernels_blackwell.quantization"
MXFP8_METHOD = Quantization("mxfp8", f"{_READ}:read_mxfp8", MXFP8)
NVFP4_METHOD = Quantization("nvfp4", f"{_READ}:read_nvfp4")

_MOE_AXES = {
    "num_experts": "experts E",
    "top_k": "experts per token, k",
    "hidden_size": "hidden size N, a multiple of 32",
    "intermediate_size": "intermediate size I of an expert, a multiple of 32",
}
_MOE_CASES = (
    {"num_experts": 6, "top_k": 2, "hidden_size": 96, "intermediate_size": 64},
    {"num_experts": 6, "top_k": 2, "hidden_size": 128, "intermediate_size": 128},
    {"num_experts": 16, "top_k": 4, "hidden_size": 256, "intermediate_size": 384},
)


def _near(distance: float) -> tuple[Tolerance, ...]:
    source = "a hidden value halfway between two codes may round to either, which changes all sums of its token"
    return tuple(
        Tolerance(dtype, relative, distance, source)
        for dtype, relative in (("float32", 2e-3), ("bfloat16", 1e-2), ("float16", 2e-3))
    )


MOE = (
    OpContract(
        "moe_experts_mxfp8",
        "moe",
        "(x [T, N], gate_up float8_e4m3fn [E, 2I, N], gate_up_scale uint8 [E, 2I, N / 32], down float8_e4m3fn "
        "[E, N, I], down_scale uint8 [E, N, I / 32], weights float32 [T, k], ids int32 [T, k]) -> y [T, N]: sum over a "
        "token's experts of weight * down @ q(silu_mul(gate_up @ q(x))), where q is quantize_mxfp8; intermediate "
        "results are float32. An id of E means no expert",
        _MOE_AXES,
        "tokenspeed_kernels_blackwell.moe.reference:moe_experts_mxfp8",
        "tokenspeed_kernels_blackwell.moe.inputs:moe_experts_mxfp8",
        _near(0.04),
        rows=("x", "weights", "ids"),
        cases=_MOE_CASES,
    ),
    OpContract(
        "moe_experts_nvfp4",
        "moe",
        "(x [T, N], x_scale float32 [1], gate_up uint8 [E, 2I, N / 2], gate_up_scale float8_e4m3fn [E, 2I, N / 16], "
        "gate_up_factor float32 [E], hidden_scale float32 [1], down uint8 [E, N, I / 2], down_scale float8_e4m3fn "
        "[E, N, I / 16], down_factor float32 [E], weights float32 [T, k], ids int32 [T, k]) -> y [T, N]: as "
        "moe_experts_mxfp8, where q is quantize_nvfp4 with x_scale for x and hidden_scale for the hidden state; "
        "gate_up_factor and down_factor are per-tensor weight scales of each expert",
        _MOE_AXES,
        "tokenspeed_kernels_blackwell.moe.reference:moe_experts_nvfp4",
        "tokenspeed_kernels_blackwell.moe.inputs:moe_experts_nvfp4",
        _near(0.1),
        rows=("x", "weights", "ids"),
        cases=_MOE_CASES,
    ),
)
