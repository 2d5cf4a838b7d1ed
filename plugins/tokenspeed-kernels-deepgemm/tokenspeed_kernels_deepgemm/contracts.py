"""The ops that this distribution brings: e4m3 operands with a scale a block. Imports no tensor library."""

from __future__ import annotations

from tokenspeed_core.api import DOTS, OpContract, Tolerance

_REFERENCE, _INPUTS = "tokenspeed_kernels_deepgemm.reference", "tokenspeed_kernels_deepgemm.inputs"
_CODES = tuple(
    Tolerance(dtype, 0.13, 4e-3, "a value near the middle of two e4m3 codes may become either, 1/8 apart")
    for dtype in ("float32", "bfloat16", "float16")
)

FP8_BLOCK = (
    OpContract(
        "quantize_fp8_groups", "linear",
        "(x [T, N]) -> (y float8_e4m3fn [T, N], scale float32 [T, ceil(N / 128)]): scale is the largest magnitude of "
        "128 neighbours / 448 (of 1e-10 at least), y = x / scale rounded",
        {"size": "elements of a row, N"},
        f"{_REFERENCE}:quantize_fp8_groups", f"{_INPUTS}:quantize_fp8_groups", _CODES, rows=("x",),
        cases=({"size": 64}, {"size": 256}, {"size": 1100}),
    ),
    OpContract(
        "linear_fp8_block", "linear",
        "(x float8_e4m3fn [T, I], x_scale float32 [T, ceil(I / 128)], weight float8_e4m3fn [O, I], weight_scale "
        "float32 [ceil(O / 128), ceil(I / 128)], bias [O] | None) -> y [T, O] of the dtype: a scale of x belongs to "
        "128 neighbours of a row, one of the weight to 128 rows of 128 neighbours",
        {"in_size": "input features I", "out_size": "output features O"},
        f"{_REFERENCE}:linear_fp8_block", f"{_INPUTS}:linear_fp8_block", DOTS, rows=("x", "x_scale"),
        cases=({"in_size": 256, "out_size": 384}, {"in_size": 128, "out_size": 128}, {"in_size": 200, "out_size": 50}),
    ),
)
