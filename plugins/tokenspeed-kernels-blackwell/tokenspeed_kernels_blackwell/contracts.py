"""The ops that this distribution brings: linear maps of block-scaled operands. Imports no tensor library."""

from __future__ import annotations

from tokenspeed_core.api import DOTS, OpContract, Tolerance

_REFERENCE, _INPUTS = "tokenspeed_kernels_blackwell.reference", "tokenspeed_kernels_blackwell.inputs"
_ROWS = {"size": "elements of a row, N, a multiple of 32"}
_SIZES = {"in_size": "input features I, a multiple of 32", "out_size": "output features O"}
_CASES = ({"in_size": 128, "out_size": 48}, {"in_size": 384, "out_size": 200}, {"in_size": 256, "out_size": 130})
_DTYPES = ("float32", "bfloat16", "float16")
_EXACT = tuple(Tolerance(dtype, 0.0, 0.0, "codes and scales are defined to the bit") for dtype in _DTYPES)

BLOCK_SCALED = (
    OpContract(
        "quantize_mxfp8", "linear",
        "(x [T, N]) -> (y float8_e4m3fn [T, N], scale uint8 [T, N / 32]): 32 neighbours share 2^(scale - 127), "
        "the least power of two by which their largest magnitude is within 448; y = x / that, rounded",
        _ROWS, f"{_REFERENCE}:quantize_mxfp8", f"{_INPUTS}:quantize_mxfp8", _EXACT, rows=("x",),
        cases=({"size": 64}, {"size": 1024}),
    ),
    OpContract(
        "linear_mxfp8", "linear",
        "(x float8_e4m3fn [T, I], x_scale uint8 [T, I / 32], weight float8_e4m3fn [O, I], weight_scale uint8 "
        "[O, I / 32], bias [O] | None) -> y [T, O] of the dtype; scales as quantize_mxfp8 gives them",
        _SIZES, f"{_REFERENCE}:linear_mxfp8", f"{_INPUTS}:linear_mxfp8", DOTS, rows=("x", "x_scale"), cases=_CASES,
    ),
    OpContract(
        "quantize_nvfp4", "linear",
        "(x [T, N], scale float32 [1]) -> (y uint8 [T, N / 2], group_scale float8_e4m3fn [T, N / 16]): 16 neighbours "
        "share group_scale * scale, their largest magnitude / 6, rounded to e4m3 after the division by scale; y = x / "
        "that rounded to e2m1, two in a byte, the earlier in the low bits",
        _ROWS, f"{_REFERENCE}:quantize_nvfp4", f"{_INPUTS}:quantize_nvfp4", _EXACT, rows=("x",),
        cases=({"size": 64}, {"size": 1024}),
    ),
    OpContract(
        "linear_nvfp4", "linear",
        "(x uint8 [T, I / 2], x_scale float8_e4m3fn [T, I / 16], weight uint8 [O, I / 2], weight_scale float8_e4m3fn "
        "[O, I / 16], scale float32 [1], bias [O] | None) -> y [T, O] of the dtype; operands as quantize_nvfp4 gives "
        "them, scale the product of both of theirs",
        _SIZES, f"{_REFERENCE}:linear_nvfp4", f"{_INPUTS}:linear_nvfp4", DOTS, rows=("x", "x_scale"), cases=_CASES,
    ),
)
