"""Op contracts of this distribution: the ops of model layers besides attention, and those that update a step's state.

Imports no tensor library.
"""

from __future__ import annotations

from tokenspeed_core.api import DOTS, OpContract, OpReference, Tolerance

_INPUTS = "tokenspeed_kernels.inputs"
_REFERENCE = "tokenspeed_kernels.reference"

_ROUNDING = (
    Tolerance("float32", 1e-5, 1e-5, "a few roundings of 2^-24 in sums of up to 8192 terms"),
    Tolerance("bfloat16", 2e-2, 2e-2, "two or three roundings of 2^-9, with room for cancellation"),
    Tolerance("float16", 4e-3, 4e-3, "two or three roundings of 2^-12, with room for cancellation"),
)
_FP8_PRODUCTS = (
    Tolerance("float32", 2e-3, 5e-3, "FP8 tensor cores accumulate with about 14 bits"),
    *(each for each in DOTS if each.dtype != "float32"),
)
_ROWS = ({"size": 64}, {"size": 200}, {"size": 1024})
_NORM = {"size": "row size N"}
NORM = (
    OpContract(
        "rms_norm",
        "norm",
        "(x [..., N], weight [N], eps: float) -> y [..., N]: RMS norm in float32, cast to the dtype, times weight. "
        "Here and in fused ops, norm weights are of the dtype or float32",
        _NORM,
        f"{_REFERENCE}.norm:rms_norm",
        f"{_INPUTS}:rms_norm",
        _ROUNDING,
        rows=("x",),
        cases=_ROWS,
    ),
    OpContract(
        "add_rms_norm",
        "norm",
        "(x [T, N], residual [T, N], weight [N], eps) -> (y, residual): residual += x; y = rms_norm(residual)",
        _NORM,
        f"{_REFERENCE}.norm:add_rms_norm",
        f"{_INPUTS}:add_rms_norm",
        _ROUNDING,
        mutates=("residual",),
        rows=("x", "residual"),
        parts=("rms_norm",),
        cases=_ROWS,
    ),
)

_HEADS = {
    "num_heads": "query heads H",
    "num_kv_heads": "KV heads K",
    "head_size": "head size D",
    "rotary_size": "leading elements of a head that are rotated, R <= D, even",
}
_CACHE = {"block_size": "tokens per block", "kv_dtype": "dtype of the cache"}
_ROPES = (
    {"num_heads": 6, "num_kv_heads": 2, "head_size": 64, "rotary_size": 64},
    {"num_heads": 5, "num_kv_heads": 1, "head_size": 48, "rotary_size": 32},
    {"num_heads": 4, "num_kv_heads": 4, "head_size": 128, "rotary_size": 128},
)
ROPE = (
    OpContract(
        "rope",
        "rope",
        "(q [T, H, D], k [T, K, D], positions int64 [T], cos_sin float32 [P, R], interleaved: bool) -> None; "
        "in place; a row of cos_sin is R/2 cosines, then R/2 sines; pairs are (0, 1), (2, 3), … if interleaved, else "
        "(0, R/2), (1, R/2 + 1), …",
        _HEADS,
        f"{_REFERENCE}.rope:rope",
        f"{_INPUTS}:rope",
        _ROUNDING,
        mutates=("q", "k"),
        rows=("q", "k", "positions"),
        cases=_ROPES,
    ),
    OpContract(
        "qk_norm_rope",
        "rope",
        "(q [T, H, D], k [T, K, D], q_weight [D], k_weight [D], eps, positions int64 [T], "
        "cos_sin float32 [P, R], interleaved: bool) -> None: rms_norm of each head, then rope, in place",
        _HEADS,
        f"{_REFERENCE}.rope:qk_norm_rope",
        f"{_INPUTS}:qk_norm_rope",
        _ROUNDING,
        mutates=("q", "k"),
        rows=("q", "k", "positions"),
        parts=("rms_norm", "rope"),
        cases=_ROPES,
    ),
)

_LINEAR = {"in_size": "input features I", "out_size": "output features O"}
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
        f"{_REFERENCE}.activation:silu_mul",
        f"{_INPUTS}:silu_mul",
        _ROUNDING,
        rows=("x",),
        cases=({"size": 100}, {"size": 1536}),
    ),
    OpContract(
        "gelu_tanh_mul",
        "activation",
        "(x [T, 2N]) -> y [T, N]: gelu(first half), by its tanh approximation, * second half",
        {"size": "row size N of the result"},
        f"{_REFERENCE}.activation:gelu_tanh_mul",
        f"{_INPUTS}:silu_mul",
        _ROUNDING,
        rows=("x",),
        cases=({"size": 100}, {"size": 1536}),
    ),
    OpContract(
        "linear",
        "linear",
        "(x [T, I], weight [O, I], bias [O] | None) -> y [T, O]",
        _LINEAR,
        f"{_REFERENCE}.linear:linear",
        f"{_INPUTS}:linear",
        DOTS,
        rows=("x",),
        cases=_LINEAR_CASES,
    ),
    OpContract(
        "add_rms_norm_linear",
        "linear",
        "(x [T, I], residual [T, I], norm_weight [I], eps: float, weight [O, I], bias [O] | None) -> (y [T, O], "
        "total [T, I]): total = x + residual, a new tensor; y = linear(rms_norm(total))",
        _LINEAR,
        f"{_REFERENCE}.fused_linear:add_rms_norm_linear",
        f"{_INPUTS}:add_rms_norm_linear",
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
        _LINEAR,
        f"{_REFERENCE}.fused_linear:add_rms_norm_linear_silu_mul",
        f"{_INPUTS}:add_rms_norm_linear_silu_mul",
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
        _LINEAR,
        f"{_REFERENCE}.fused_linear:add_rms_norm_linear_gelu_tanh_mul",
        f"{_INPUTS}:add_rms_norm_linear_silu_mul",
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
        f"{_REFERENCE}.fused_linear:fused_block",
        f"{_INPUTS}:fused_block",
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
        f"{_REFERENCE}.fused_linear:fused_block_in_place",
        f"{_INPUTS}:fused_block",
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


def _write(rotation: str, arguments: str) -> OpContract:
    name = f"{rotation}_write_kv"
    return OpContract(
        name,
        "cache",
        "(q [T, H, D], k [T, K, D], v [T, K, D], k_cache [B, block_size, K, D], v_cache, slots int64 [T], "
        f"{arguments}) -> None: {rotation} of q in place, {rotation} of k into the cache, v into the cache like write_kv",
        {**_HEADS, **_CACHE},
        f"{_REFERENCE}.rope_cache:{name}",
        f"{_INPUTS}:{name}",
        _ROUNDING,
        mutates=("q", "k_cache", "v_cache"),
        rows=("q", "k", "v", "slots", "positions"),
        parts=(rotation, "write_kv"),
        cases=tuple({**case, "block_size": 16} for case in _ROPES),
    )


ROPE_CACHE = (
    _write("rope", "positions, cos_sin, interleaved"),
    _write("qk_norm_rope", "q_weight [D], k_weight [D], eps, positions, cos_sin, interleaved"),
)

_CORE_INPUTS = {
    "attention": "tokenspeed_testing.attention:make_fixture",
    **{op: f"tokenspeed_testing.inputs:{op}" for op in ("write_kv", "greedy", "sample")},
    **{
        op: f"{_INPUTS}:{op}" for op in ("note_tokens", "mask_logits", "advance_rows", "map_tokens")
    },
}
_CORE_MODULES = {
    "attention": "attention",
    "write_kv": "cache",
    "advance_rows": "cache",
    "map_tokens": "cache",
    "greedy": "sampling",
    "sample": "sampling",
    "note_tokens": "sampling",
    "mask_logits": "sampling",
}
CORE_REFERENCES = tuple(
    OpReference(op, f"{_REFERENCE}.{module}:{op}", _CORE_INPUTS[op])
    for op, module in _CORE_MODULES.items()
)

_MOE = {"num_experts": "experts E", "top_k": "experts per token, k"}
_ROUTING = {
    **_MOE,
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
_EXPERTS = {
    **_MOE,
    "hidden_size": "hidden size N",
    "intermediate_size": "intermediate size I of an expert",
}
MOE = (
    OpContract(
        "moe_route",
        "moe",
        "(logits [T, E], bias float32 [E], or None without has_bias) -> (weights float32 [T, k], ids int32 [T, k]), computed in float32: "
        "the k experts with the largest score + bias in the top_groups best groups, in descending order, the lower id "
        "first among equals; groups are ranked in the same way; weights are the scores of the chosen, without bias",
        _ROUTING,
        f"{_REFERENCE}.moe:moe_route",
        f"{_INPUTS}:moe_route",
        _ROUNDING,
        rows=("logits",),
        cases=(
            {"num_experts": 12, "top_k": 3, **_SOFTMAX},
            {"num_experts": 128, "top_k": 8, **_SOFTMAX, "renormalize": True},
            {"num_experts": 32, "top_k": 4, **_SOFTMAX, "score": "top_k_softmax"},
            {"num_experts": 40, "top_k": 3, **_SOFTMAX, "num_groups": 5, "top_groups": 2},
            {"num_experts": 24, "top_k": 5, **_SIGMOID},
            {
                "num_experts": 96,
                "top_k": 4,
                **_SIGMOID,
                "num_groups": 8,
                "top_groups": 4,
                "group_score": "top_2_sum",
            },
        ),
    ),
    OpContract(
        "moe_logits",
        "moe",
        "(x [T, N], weight float32 [E, N]) -> y float32 [T, E]: x @ weight.T in float32",
        {"num_experts": "experts E", "hidden_size": "hidden size N"},
        f"{_REFERENCE}.moe:moe_logits",
        f"{_INPUTS}:moe_logits",
        _ROUNDING,
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
        "-> y [T, N]: sum over a token's experts of weight * down @ silu_mul(gate_up @ x)",
        _EXPERTS,
        f"{_REFERENCE}.moe:moe_experts",
        f"{_INPUTS}:moe_experts",
        DOTS,
        rows=("x", "weights", "ids"),
        cases=(
            {"num_experts": 6, "top_k": 2, "hidden_size": 40, "intermediate_size": 24},
            {"num_experts": 16, "top_k": 4, "hidden_size": 128, "intermediate_size": 96},
        ),
    ),
)

_CODES = tuple(
    Tolerance(
        dtype, 0.13, 4e-3, "a value halfway between two e4m3 codes, 1/8 apart, may round to either"
    )
    for dtype in ("float32", "bfloat16", "float16")
)
_CODED_DOTS = tuple(
    Tolerance(
        dtype, 5e-2, 0.25, "values halfway between two e4m3 codes, 1/8 apart, may round to either"
    )
    for dtype in ("float32", "bfloat16", "float16")
)
_CODED_EXPERTS = tuple(
    Tolerance(
        dtype,
        relative,
        absolute,
        "a hidden value, rounded to the dtype and halfway between two e4m3 codes, may round to either, "
        "which changes all sums of its token",
    )
    for dtype, relative, absolute in (
        ("float32", 2e-3, 0.06),
        ("bfloat16", 1e-2, 0.25),
        ("float16", 2e-3, 0.15),
    )
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
        f"{_REFERENCE}.fp8:quantize_fp8",
        f"{_INPUTS}:quantize_fp8",
        _CODES,
        rows=("x",),
        cases=_ROWS,
    ),
    OpContract(
        "add_rms_norm_fp8",
        "norm",
        "(x [T, N], residual [T, N], weight [N], eps) -> (y float8_e4m3fn [T, N], scale float32 [T, 1], residual): "
        "residual += x; y, scale = quantize_fp8(rms_norm(residual))",
        _NORM,
        f"{_REFERENCE}.fp8:add_rms_norm_fp8",
        f"{_INPUTS}:add_rms_norm",
        _CODES,
        mutates=("residual",),
        rows=("x", "residual"),
        parts=("add_rms_norm", "quantize_fp8"),
        cases=_ROWS,
    ),
    OpContract(
        "silu_mul_fp8",
        "activation",
        "(x [T, 2N]) -> (y float8_e4m3fn [T, N], scale float32 [T, 1]): quantize_fp8(silu_mul(x))",
        {"size": "row size N of the result"},
        f"{_REFERENCE}.fp8:silu_mul_fp8",
        f"{_INPUTS}:silu_mul",
        _CODES,
        rows=("x",),
        parts=("silu_mul", "quantize_fp8"),
        cases=_ROWS,
    ),
    OpContract(
        "linear_fp8",
        "linear",
        "(x float8_e4m3fn [T, I], x_scale float32 [T, 1], weight float8_e4m3fn [O, I], weight_scale float32 [O, 1], "
        "bias [O] | None) -> y [T, O] of the dtype: (x * x_scale) @ (weight * weight_scale).T + bias",
        _LINEAR,
        f"{_REFERENCE}.fp8:linear_fp8",
        f"{_INPUTS}:linear_fp8",
        DOTS,
        rows=("x", "x_scale"),
        cases=_LINEAR_FP8_CASES,
    ),
    OpContract(
        "quantize_linear_fp8",
        "linear",
        "(x [T, I], weight float8_e4m3fn [O, I], weight_scale float32 [O, 1], bias [O] | None) -> y [T, O]: "
        "linear_fp8 of quantize_fp8(x)",
        _LINEAR,
        f"{_REFERENCE}.fp8:quantize_linear_fp8",
        f"{_INPUTS}:quantize_linear_fp8",
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
        _LINEAR,
        f"{_REFERENCE}.fp8:add_rms_norm_linear_fp8",
        f"{_INPUTS}:add_rms_norm_linear_fp8",
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
        f"{_REFERENCE}.fp8:add_rms_norm_mlp_fp8",
        f"{_INPUTS}:add_rms_norm_mlp_fp8",
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
        "q are rounded to the dtype",
        _EXPERTS,
        f"{_REFERENCE}.moe_w8a8:moe_experts_fp8",
        f"{_INPUTS}:moe_experts_fp8",
        _CODED_EXPERTS,
        rows=("x", "weights", "ids"),
        cases=(
            {"num_experts": 6, "top_k": 2, "hidden_size": 48, "intermediate_size": 80},
            {"num_experts": 16, "top_k": 4, "hidden_size": 256, "intermediate_size": 384},
            {"num_experts": 5, "top_k": 2, "hidden_size": 40, "intermediate_size": 24},
        ),
    ),
)

_GROUPED_ROWS = ({"size": 64}, {"size": 256}, {"size": 1100})
FP8_BLOCK = (
    OpContract(
        "quantize_fp8_groups",
        "linear",
        "(x [T, N]) -> (y float8_e4m3fn [T, N], scale float32 [T, ceil(N / 128)]): one scale per 128 elements of a row, "
        "max(|group|, 1e-10) / 448; y = x / scale, rounded",
        {"size": "row size N"},
        f"{_REFERENCE}.fp8_block:quantize_fp8_groups",
        f"{_INPUTS}:quantize_fp8",
        _CODES,
        rows=("x",),
        cases=_GROUPED_ROWS,
    ),
    OpContract(
        "add_rms_norm_fp8_groups",
        "norm",
        "(x [T, N], residual [T, N], weight [N], eps) -> (y float8_e4m3fn [T, N], scale float32 [T, ceil(N / 128)], "
        "residual): residual += x; y, scale = quantize_fp8_groups(rms_norm(residual))",
        _NORM,
        f"{_REFERENCE}.fp8_block:add_rms_norm_fp8_groups",
        f"{_INPUTS}:add_rms_norm",
        _CODES,
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
        f"{_REFERENCE}.fp8_block:silu_mul_fp8_groups",
        f"{_INPUTS}:silu_mul",
        _CODES,
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
        f"{_REFERENCE}.fp8_block:quantize_fp8_blocks",
        f"{_INPUTS}:quantize_fp8_blocks",
        _CODES,
        cases=({"size": 64}, {"size": 256}, {"size": 300}),
    ),
    OpContract(
        "linear_fp8_block",
        "linear",
        "(x float8_e4m3fn [T, I], x_scale float32 [T, ceil(I / 128)], weight float8_e4m3fn [O, I], weight_scale "
        "float32 [ceil(O / 128), ceil(I / 128)], bias [O] | None) -> y [T, O] of the dtype; block-wise scales, 1 x 128 "
        "for x and 128 x 128 for the weight",
        _LINEAR,
        f"{_REFERENCE}.fp8_block:linear_fp8_block",
        f"{_INPUTS}:linear_fp8_block",
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
        _EXPERTS,
        f"{_REFERENCE}.moe_w8a8:moe_experts_fp8_block",
        f"{_INPUTS}:moe_experts_fp8_block",
        _CODED_EXPERTS,
        rows=("x", "weights", "ids"),
        cases=(
            {"num_experts": 6, "top_k": 2, "hidden_size": 144, "intermediate_size": 128},
            {"num_experts": 16, "top_k": 4, "hidden_size": 256, "intermediate_size": 384},
        ),
    ),
)
