"""All that stands between two layers' attention, for many rows: what a product adds to the residual stream, it adds.

A norm that adds reads two tensors and writes two; behind a product that added it reads one and writes one. Where rows
are many, products are bound by the matrix units and their power, and the memory's share of that is saved.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from tokenspeed_core.api import Problem
from tokenspeed_kernels.reference.fused_linear import FusedBlock
from tokenspeed_kernels.triton.activation.silu_mul import silu_mul
from tokenspeed_kernels.triton.linear.gated_gemm import MIN_ROWS, can_gate, gated_linear
from tokenspeed_kernels.triton.norm.rms_norm import rms_norm


def fused_block_in_place(problem: Problem) -> FusedBlock:
    """Return `apply(x, residual, out, norm, gate_up, down, next_norm, qkv, eps) -> (y [T, O], residual [T, H])`."""
    hidden, inner, dtype = problem["hidden_size"], problem["intermediate_size"], problem["dtype"]
    norm, gate = (
        rms_norm({"size": hidden, "dtype": dtype}),
        silu_mul({"size": inner, "dtype": dtype}),
    )
    product = {"in_size": hidden, "out_size": inner, "dtype": dtype}
    gated = gated_linear(product) if can_gate(product) else None

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
