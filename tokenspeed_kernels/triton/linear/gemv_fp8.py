"""FP8 linear layers fused with quantization, RMS norm and SwiGLU: one GEMV kernel for one token, else separate kernels.

Every program of the GEMV quantizes the token itself: the row is small, and the weights are being loaded meanwhile.
"""

from __future__ import annotations

from functools import partial

import triton
from torch import Tensor

from tokenspeed_core.api import Problem
from tokenspeed_kernels.reference.fp8 import AddNormLinearFp8, AddNormMLPFp8, QuantizeLinear
from tokenspeed_kernels.triton import precompile
from tokenspeed_kernels.triton.linear.gemm_fp8 import blank_fp8, linear_fp8
from tokenspeed_kernels.triton.linear.gemv import Before, Tiling, multiply
from tokenspeed_kernels.triton.pdl import supports_pdl
from tokenspeed_kernels.triton.quantize.fp8_per_token import (
    quantize_fp8,
    silu_mul_fp8,
    sum_rms_norm_fp8,
)

PER_THREAD = 256  # weight elements per thread: sixteen loads of 16 bytes in flight


def row_tiling(in_size: int, *, gated: bool = False) -> Tiling:
    """Return the tiling: eight weight rows per program, or four for long rows."""
    length = triton.next_power_of_2(in_size)
    num_rows = 8 if length <= 4096 else 4
    num_warps = min(8, max(1, num_rows * length // (32 * PER_THREAD)))
    return Tiling(num_rows // 2 if gated else num_rows, num_warps)


def quantize_linear_fp8(problem: Problem) -> QuantizeLinear:
    """Return `apply(x [T, I], weight [O, I], weight_scale [O, 1], bias) -> y [T, O]`."""
    in_size, out_size, pdl = problem["in_size"], problem["out_size"], supports_pdl()
    quantize = quantize_fp8({"size": in_size, "dtype": problem["dtype"]})
    linear = linear_fp8(problem)
    tiling = row_tiling(in_size)

    def apply(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
        if x.shape[0] != 1:
            return linear(*quantize(x), weight, weight_scale, bias)
        y = x.new_empty((1, out_size))
        multiply(x, weight, bias, y, tiling, weight_scale=weight_scale, pdl=pdl)
        return y

    precompile.compile_for(
        apply, precompile.blank(problem["dtype"], 1, in_size), *blank_fp8(out_size, in_size), None
    )
    return apply


def add_rms_norm_linear_fp8(problem: Problem) -> AddNormLinearFp8:
    """Return `apply(x, residual [T, I], norm_weight, eps, weight [O, I], weight_scale, bias) -> (y, x + residual)`."""
    in_size, out_size, pdl = problem["in_size"], problem["out_size"], supports_pdl()
    norm = sum_rms_norm_fp8({"size": in_size, "dtype": problem["dtype"]})
    linear = linear_fp8(problem)
    tiling = row_tiling(in_size)

    def apply(
        x: Tensor,
        residual: Tensor,
        norm_weight: Tensor,
        eps: float,
        weight: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        if x.shape[0] != 1:
            codes, scale, total = norm(x, residual, norm_weight, eps)
            return linear(codes, scale, weight, weight_scale, bias), total
        before = Before(residual, x.new_empty(x.shape), norm_weight, eps)
        y = x.new_empty((1, out_size))
        multiply(x, weight, bias, y, tiling, weight_scale=weight_scale, before=before, pdl=pdl)
        return y, before.total

    blank = partial(precompile.blank, problem["dtype"])
    row = blank(1, in_size)
    precompile.compile_for(
        apply, row, row, blank(in_size), 0.0, *blank_fp8(out_size, in_size), None
    )
    return apply


def add_rms_norm_mlp_fp8(problem: Problem) -> AddNormMLPFp8:
    """Return `apply(x, residual [T, N], norm_weight, eps, gate_up, …, down, …) -> (y [T, N], x + residual)`."""
    hidden, size, dtype = problem["hidden_size"], problem["size"], problem["dtype"]
    pdl = supports_pdl()
    widen = add_rms_norm_linear_fp8({"in_size": hidden, "out_size": 2 * size, "dtype": dtype})
    gate = silu_mul_fp8({"size": size, "dtype": dtype})
    narrow = linear_fp8({"in_size": size, "out_size": hidden, "dtype": dtype})
    gate_tiling, down_tiling = row_tiling(hidden, gated=True), row_tiling(size)

    def apply(
        x: Tensor,
        residual: Tensor,
        norm_weight: Tensor,
        eps: float,
        gate_up: Tensor,
        gate_up_scale: Tensor,
        gate_up_bias: Tensor | None,
        down: Tensor,
        down_scale: Tensor,
        down_bias: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        if x.shape[0] != 1:
            halves, total = widen(
                x, residual, norm_weight, eps, gate_up, gate_up_scale, gate_up_bias
            )
            return narrow(*gate(halves), down, down_scale, down_bias), total
        before = Before(residual, x.new_empty(x.shape), norm_weight, eps)
        inner = x.new_empty((1, size))
        multiply(
            x,
            gate_up,
            gate_up_bias,
            inner,
            gate_tiling,
            weight_scale=gate_up_scale,
            before=before,
            gated=True,
            pdl=pdl,
        )
        y = x.new_empty((1, hidden))
        multiply(inner, down, down_bias, y, down_tiling, weight_scale=down_scale, pdl=pdl)
        return y, before.total

    row, weight = precompile.blank(dtype, 1, hidden), precompile.blank(dtype, hidden)
    precompile.compile_for(
        apply,
        row,
        row,
        weight,
        0.0,
        *blank_fp8(2 * size, hidden),
        None,
        *blank_fp8(hidden, size),
        None,
    )
    return apply
