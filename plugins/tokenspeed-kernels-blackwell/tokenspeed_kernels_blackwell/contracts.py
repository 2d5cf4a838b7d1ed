"""The ops that this distribution brings, and the methods that use them. Imports no tensor library.

docs/contract.json holds what each op says; whatever changes that raises `OPS_API`.
"""

from __future__ import annotations

from tokenspeed_core.api import DOTS, OpContract, Quantization, Tolerance

OPS_API = 2

_REFERENCE, _INPUTS = (
    "tokenspeed_kernels_blackwell.reference",
    "tokenspeed_kernels_blackwell.inputs",
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
        "tokenspeed_kernels_blackwell.latent:mla_decode",
        "tokenspeed_kernels_blackwell.latent_inputs:mla_decode",
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
