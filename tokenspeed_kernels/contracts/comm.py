"""Contracts of the collectives between modules.

The factory of such a kernel takes a problem and a `CommGroup`. All processes of the group call it at the same point.
"""

from __future__ import annotations

from collections.abc import Mapping

from tokenspeed_core.api import FUSED_OP, OpContract, Tolerance
from tokenspeed_kernels.contracts.common import CODES, NORM_AXES, REFERENCE

# They return the norm in its dtype, or in FP8 with one scale per token or per 128 elements.
FUSED_OPS = (FUSED_OP, f"{FUSED_OP}_fp8", f"{FUSED_OP}_fp8_groups")

_SUMS = (
    Tolerance("float32", 1e-5, 1e-5, "one rounding of 2^-24 for each summand, in any order"),
    Tolerance("bfloat16", 2e-2, 2e-2, "one rounding of 2^-9 for each summand, in any order"),
    Tolerance("float16", 4e-3, 4e-3, "one rounding of 2^-12 for each summand, in any order"),
)
_COPIES = tuple(
    Tolerance(each.dtype, 0.0, 0.0, "the values are copied, not computed") for each in _SUMS
)
_AXES = {
    "num_processes": "processes P of the group",
    "num_nodes": "machines that run these processes",
    "size": "values N per row of the result",
}
_FUSED_AXES = {**_AXES, **NORM_AXES, "max_num_tokens": "largest T"}


def _contract(
    name: str,
    signature: str,
    tolerances: tuple[Tolerance, ...],
    mutates: tuple[str, ...],
    axes: Mapping[str, str] = _AXES,
    parts: tuple[str, ...] = (),
) -> OpContract:
    return OpContract(
        name,
        "comm",
        f"{signature}. The factory takes the problem and a CommGroup; all processes of the group call the kernel",
        axes,
        f"{REFERENCE}.comm:{name}",
        "",
        tolerances,
        mutates=mutates,
        parts=parts,
        errors="an exception of torch.distributed if another process has ended",
    )


COMM = (
    _contract("all_reduce", "(x [T, N]) -> x: the sum of the x of all processes", _SUMS, ("x",)),
    _contract(
        "all_gather",
        "(x [T, N / P]) -> [T, N]: each row joins the parts of all processes, in rank order",
        _COPIES,
        (),
    ),
    _contract(
        "all_gather_tokens",
        "(x [T of this process, N]) -> [T of all processes, N]: the tokens of all processes in rank order; the "
        "group's TokenCounts has their numbers, which are equal in captured CUDA graphs",
        _COPIES,
        (),
    ),
    _contract(
        "reduce_scatter_tokens",
        "(x [T of all processes, N]) -> [T of this process, N]: the sum of the x of all processes, of which each process "
        "gets the rows of its tokens; x is in the order of all_gather_tokens; the numbers of tokens are equal in "
        "captured CUDA graphs",
        _SUMS,
        (),
    ),
    _contract(
        "exchange_tokens",
        "(x [T of this process, N], weights float32 [T, k], ids int32 [T, k], owners int32 [E], compute) -> [T, N]: for "
        "each token, the sum of compute(x, weights, ids) of the processes that own one of its experts; ids are from 0 to "
        "E - 1, and replicas of an expert have ids of their own; each process makes at most one call, with the rows that it received from all processes",
        _SUMS,
        (),
    ),
    _contract(
        FUSED_OP,
        "(x [T, N], residual [T, N], weight [N], eps) -> (y [T, N], residual): residual += the sum of the x of all "
        "processes, which is computed in float32 in the order of their ranks, and rounded; y = rms_norm(residual); all "
        "processes get the same bits",
        _SUMS,
        ("residual",),
        _FUSED_AXES,
    ),
    *(
        _contract(
            op,
            f"(x [T, N], residual [T, N], weight [N], eps) -> (y float8_e4m3fn [T, N], scale float32 [T, {scales}], "
            f"residual): the results of {FUSED_OP}, with y quantized by {quantize}",
            CODES,
            ("residual",),
            _FUSED_AXES,
            (FUSED_OP, quantize),
        )
        for op, quantize, scales in zip(
            FUSED_OPS[1:],
            ("quantize_fp8", "quantize_fp8_groups"),
            ("1", "ceil(N / 128)"),
            strict=True,
        )
    ),
)
