"""The ops that this distribution brings, and the methods that use them. Imports no tensor library."""

from __future__ import annotations

from tokenspeed_core.api import DOTS, OpContract, Quantization, Tolerance

_REFERENCE, _INPUTS = (
    "tokenspeed_kernels_blackwell.linear.reference",
    "tokenspeed_kernels_blackwell.linear.inputs",
)
_ROWS = {"size": "elements of a row, N, a multiple of 32"}
_SIZES = {"in_size": "input features I, a multiple of 32", "out_size": "output features O"}
_CASES = (
    {"in_size": 128, "out_size": 48},
    {"in_size": 384, "out_size": 200},
    {"in_size": 256, "out_size": 130},
)
_DTYPES = ("float32", "bfloat16", "float16")
_EXACT = tuple(
    Tolerance(dtype, 0.0, 0.0, "codes and scales are defined to the bit") for dtype in _DTYPES
)

BLOCK_SCALED = (
    OpContract(
        "quantize_mxfp8",
        "linear",
        "(x [T, N]) -> (y float8_e4m3fn [T, N], scale uint8 [T, N / 32]): 32 neighbours share 2^(scale - 127), "
        "the least power of two by which their largest magnitude is within 448; y = x / that, rounded",
        _ROWS,
        f"{_REFERENCE}:quantize_mxfp8",
        f"{_INPUTS}:quantize_mxfp8",
        _EXACT,
        rows=("x",),
        cases=({"size": 64}, {"size": 1024}),
    ),
    OpContract(
        "linear_mxfp8",
        "linear",
        "(x float8_e4m3fn [T, I], x_scale uint8 [T, I / 32], weight float8_e4m3fn [O, I], weight_scale uint8 "
        "[O, I / 32], bias [O] | None) -> y [T, O] of the dtype; scales as quantize_mxfp8 gives them",
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
        "(x [T, N], scale float32 [1]) -> (y uint8 [T, N / 2], group_scale float8_e4m3fn [T, N / 16]): 16 neighbours "
        "share group_scale * scale, their largest magnitude / 6, rounded to e4m3 after the division by scale; y = x / "
        "that rounded to e2m1, two in a byte, the earlier in the low bits",
        _ROWS,
        f"{_REFERENCE}:quantize_nvfp4",
        f"{_INPUTS}:quantize_nvfp4",
        _EXACT,
        rows=("x",),
        cases=({"size": 64}, {"size": 1024}),
    ),
    OpContract(
        "linear_nvfp4",
        "linear",
        "(x uint8 [T, I / 2], x_scale float8_e4m3fn [T, I / 16], weight uint8 [O, I / 2], weight_scale float8_e4m3fn "
        "[O, I / 16], scale float32 [1], bias [O] | None) -> y [T, O] of the dtype; operands as quantize_nvfp4 gives "
        "them, scale the product of both of theirs",
        _SIZES,
        f"{_REFERENCE}:linear_nvfp4",
        f"{_INPUTS}:linear_nvfp4",
        DOTS,
        rows=("x", "x_scale"),
        cases=_CASES,
    ),
)
MXFP8_METHOD = Quantization(
    name="mxfp8",
    dtype="float8_e4m3fn",
    quantize="quantize_mxfp8",
    linear="linear_mxfp8",
    scale_block=(1, 32),
    scale_dtype="uint8",
    fused={"moe_experts": "moe_experts_mxfp8"},
)
NVFP4_METHOD = Quantization(
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

MLA = (
    OpContract(
        "mla_decode",
        "mla",
        "(q [T, H, L + R], cache [B, block_size, L + R], block_table int32 [T, M], seq_lens int32 [T], max_seq_len: "
        "int, scale: float) -> y [T, H, L]: one query a row; all heads attend to the row's seq_lens entries of the "
        "cache, whose leading L elements are the values: softmax(scale * q . entries) @ entries[:, :L], zeros where "
        "seq_lens is 0. No row is longer than max_seq_len, nor than its table. What lies past a row's length, in its "
        "blocks and its table, may be anything. In q the absorbed query (each head's, times its up-projection of keys) "
        "stands before its rotated part, in the cache the normalised latent before the rotated key; the cache is "
        "strided on B",
        {
            "num_heads": "query heads H",
            "latent_size": "elements of a latent, L",
            "rope_size": "rotated elements, R",
            "block_size": "tokens of a block",
            "kv_dtype": "dtype of the cache",
        },
        "tokenspeed_kernels_blackwell.mla.reference:mla_decode",
        "tokenspeed_kernels_blackwell.mla.inputs:mla_decode",
        DOTS,
        rows=("q", "block_table", "seq_lens"),
        errors="ValueError: more rows than the backend says it takes",
        cases=(
            {"num_heads": 5, "latent_size": 48, "rope_size": 16, "block_size": 8},
            {"num_heads": 16, "latent_size": 512, "rope_size": 64, "block_size": 64},
            {"num_heads": 7, "latent_size": 512, "rope_size": 64, "block_size": 32},
            {"num_heads": 128, "latent_size": 512, "rope_size": 64, "block_size": 64},
        ),
    ),
)

_MOE_AXES = {
    "num_experts": "experts E",
    "top_k": "experts a token goes to, k",
    "hidden_size": "features of a token, N, a multiple of 32",
    "intermediate_size": "features in an expert, I, a multiple of 32",
}
_MOE_CASES = (
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


MOE = (
    OpContract(
        "moe_experts_mxfp8",
        "moe",
        "(x [T, N], gate_up float8_e4m3fn [E, 2I, N], gate_up_scale uint8 [E, 2I, N / 32], down float8_e4m3fn "
        "[E, N, I], down_scale uint8 [E, N, I / 32], weights float32 [T, k], ids int32 [T, k]) -> y [T, N]: the sum "
        "over a token's experts of weight * down @ q(silu_mul(gate_up @ q(x))), q being quantize_mxfp8 of a row; what "
        "lies between is float32",
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
        "moe_experts_mxfp8, q being quantize_nvfp4 of a row under x_scale for x, under hidden_scale for what gate and "
        "up give; factors stand over all values of an expert's weight, gate and up sharing one",
        _MOE_AXES,
        "tokenspeed_kernels_blackwell.moe.reference:moe_experts_nvfp4",
        "tokenspeed_kernels_blackwell.moe.inputs:moe_experts_nvfp4",
        _near(0.1),
        rows=("x", "weights", "ids"),
        cases=_MOE_CASES,
    ),
)
