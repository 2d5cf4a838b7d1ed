"""Axes and tolerances that several families of ops share."""

from __future__ import annotations

from tokenspeed_core.api import Tolerance

INPUTS = "tokenspeed_kernels.inputs"
REFERENCE = "tokenspeed_kernels.reference"

ROUNDING = (
    Tolerance("float32", 1e-5, 1e-5, "a few roundings of 2^-24 in sums of up to 8192 terms"),
    Tolerance("bfloat16", 2e-2, 2e-2, "two or three roundings of 2^-9, with room for cancellation"),
    Tolerance("float16", 4e-3, 4e-3, "two or three roundings of 2^-12, with room for cancellation"),
)

CODES = tuple(
    Tolerance(
        dtype, 0.13, 4e-3, "a value halfway between two e4m3 codes, 1/8 apart, may round to either"
    )
    for dtype in ("float32", "bfloat16", "float16")
)

CODED_EXPERTS = tuple(
    Tolerance(
        dtype,
        relative,
        absolute,
        "a hidden value, rounded to the dtype and halfway between two codes, may round to either, which changes all sums "
        "of its token",
    )
    for dtype, relative, absolute in (
        ("float32", 2e-3, 0.06),
        ("bfloat16", 1e-2, 0.25),
        ("float16", 2e-3, 0.15),
    )
)

ROWS = ({"size": 64}, {"size": 200}, {"size": 1024})

NORM_AXES = {"size": "row size N"}

LINEAR_AXES = {"in_size": "input features I", "out_size": "output features O"}

MOE_AXES = {"num_experts": "experts E", "top_k": "experts per token, k"}

EXPERTS_AXES = {
    **MOE_AXES,
    "hidden_size": "hidden size N",
    "intermediate_size": "intermediate size I of an expert",
}
