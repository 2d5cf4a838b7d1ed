"""The op `fused_block_in_place`, for many rows: the GEMMs add to the residual stream in place.

A norm with a residual add reads two tensors and writes two. After a GEMM that has already added its result (addmm),
the norm reads one and writes one. With many rows the GEMMs are bound by the tensor cores and their power, so less
memory traffic leaves more power for them.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from tokenspeed_core.api import Problem
from tokenspeed_kernels.reference.fused_linear import FusedBlock
from tokenspeed_kernels.triton.activation.gated import silu_mul
from tokenspeed_kernels.triton.linear.gated_gemm import MIN_ROWS, can_gate, gated_linear
from tokenspeed_kernels.triton.norm.rms_norm import rms_norm


def fused_block_in_place(problem: Problem) -> FusedBlock:
    """Return `apply(x, residual, out, norm, gate_up, down, next_norm, qkv, eps) -> (y [T, O], residual [T, H])`."""
    hidden, inner, dtype = problem["hidden_size"], problem["intermediate_size"], problem["dtype"]
    norm = rms_norm({"size": hidden, "dtype": dtype})
    gate = silu_mul({"size": inner, "dtype": dtype})
    gate_up_problem = {"in_size": hidden, "out_size": inner, "dtype": dtype}
    gated = gated_linear(gate_up_problem) if can_gate(gate_up_problem) else None

    def apply(
        x: Tensor,
        residual: Tensor,
        out: Tensor,
        norm_weight: Tensor,
        gate_up: Tensor,
        down: Tensor,
        next_norm_weight: Tensor,
        qkv: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        normed = norm(residual.addmm_(x, out.t()), norm_weight, eps)
        if gated is not None and len(x) >= MIN_ROWS:
            middle = gated(normed, gate_up)
        else:
            middle = gate(functional.linear(normed, gate_up))
        normed = norm(residual.addmm_(middle, down.t()), next_norm_weight, eps)
        return functional.linear(normed, qkv), residual

    return apply
