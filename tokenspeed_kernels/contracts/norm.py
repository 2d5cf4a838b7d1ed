"""Contracts of norms."""

from __future__ import annotations

from tokenspeed_core.api import OpContract
from tokenspeed_kernels.contracts.common import INPUTS, NORM_AXES, REFERENCE, ROUNDING, ROWS

NORM = (
    OpContract(
        "rms_norm",
        "norm",
        "(x [..., N], weight [N], eps: float) -> y [..., N]: RMS norm in float32, cast to the dtype, times weight. "
        "Here and in fused ops, norm weights are of the dtype or float32",
        NORM_AXES,
        f"{REFERENCE}.norm:rms_norm",
        f"{INPUTS}:rms_norm",
        ROUNDING,
        rows=("x",),
        cases=ROWS,
    ),
    OpContract(
        "add_rms_norm",
        "norm",
        "(x [T, N], residual [T, N], weight [N], eps) -> (y, residual): residual += x; y = rms_norm(residual)",
        NORM_AXES,
        f"{REFERENCE}.norm:add_rms_norm",
        f"{INPUTS}:add_rms_norm",
        ROUNDING,
        mutates=("residual",),
        rows=("x", "residual"),
        parts=("rms_norm",),
        cases=ROWS,
    ),
)
