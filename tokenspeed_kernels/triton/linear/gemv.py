"""Linear layers for one token (GEMV), alone or fused with the residual add and RMS norm before and the gate after.

A GEMV is bound by reading the weight once; general libraries reach about half the bandwidth on small weights. With
any other number of rows these ops call torch's GEMM between the Triton kernels for norm and activation (`gemm`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import triton
from torch import Tensor
from torch.nn import functional

from tokenspeed_core.api import Problem
from tokenspeed_kernels.reference.fused_linear import AddNormLinear
from tokenspeed_kernels.triton import precompile
from tokenspeed_kernels.triton.linear import gemm
from tokenspeed_kernels.triton.linear.gemv_kernel import one_row
from tokenspeed_kernels.triton.pdl import supports_pdl

PER_THREAD = 64  # weight elements per thread: eight loads of 16 bytes in flight


@dataclass(frozen=True, slots=True)
class Tiling:
    """Whole weight rows per program (pairs of gate and up rows if gated), and warps per program."""

    block_n: int
    num_warps: int


def one_row_tiling(in_size: int, *, gated: bool = False) -> Tiling:
    """Return the tiling: four weight rows per program, or two for long rows, with PER_THREAD elements per thread."""
    length = triton.next_power_of_2(in_size)
    num_rows = 4 if length <= 4096 else 2
    num_warps = min(8, max(1, num_rows * length // (32 * PER_THREAD)))
    return Tiling(num_rows // 2 if gated else num_rows, num_warps)


def linear(problem: Problem) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """Return `linear(x [T, I], weight [O, I], bias [O] | None) -> y [T, O]`."""
    in_size, out_size = problem["in_size"], problem["out_size"]
    tiling, pdl = one_row_tiling(in_size), supports_pdl()

    def apply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if x.shape[0] != 1:
            return functional.linear(x, weight, bias)
        y = x.new_empty((1, out_size))
        multiply(x, weight, bias, y, tiling, pdl=pdl)
        return y

    blank = partial(precompile.blank, problem["dtype"])
    precompile.compile_for(apply, blank(1, in_size), blank(out_size, in_size), None)
    return apply


def linear_silu_mul(problem: Problem) -> Callable[[Tensor, Tensor], Tensor]:
    """Return `apply(x [T, I], weight [2O, I]) -> y [T, O]`."""
    in_size, out_size = problem["in_size"], problem["out_size"]
    parts = gemm.linear_silu_mul(problem)
    tiling, pdl = one_row_tiling(in_size, gated=True), supports_pdl()

    def apply(x: Tensor, weight: Tensor) -> Tensor:
        if x.shape[0] != 1:
            return parts(x, weight)
        y = x.new_empty((1, out_size))
        multiply(x, weight, None, y, tiling, gated=True, pdl=pdl)
        return y

    blank = partial(precompile.blank, problem["dtype"])
    precompile.compile_for(apply, blank(1, in_size), blank(2 * out_size, in_size))
    return apply


def add_rms_norm_linear(problem: Problem) -> AddNormLinear:
    """Return `apply(x, residual [T, I], norm_weight [I], eps, weight [O, I], bias) -> (y [T, O], x + residual)`."""
    return _normed(problem, gemm.add_rms_norm_linear(problem), gated=False)


def add_rms_norm_linear_silu_mul(problem: Problem) -> AddNormLinear:
    """Return `apply(x, residual [T, I], norm_weight [I], eps, weight [2O, I], bias) -> (y [T, O], x + residual)`."""
    return _normed(problem, gemm.add_rms_norm_linear_silu_mul(problem), gated=True)


def add_rms_norm_linear_gelu_tanh_mul(problem: Problem) -> AddNormLinear:
    """Return `apply(x, residual [T, I], norm_weight [I], eps, weight [2O, I], bias) -> (y [T, O], x + residual)`."""
    parts = gemm.add_rms_norm_linear_gelu_tanh_mul(problem)
    return _normed(problem, parts, gated=True, is_gelu=True)


def _normed(
    problem: Problem, parts: AddNormLinear, *, gated: bool, is_gelu: bool = False
) -> AddNormLinear:
    in_size, out_size = problem["in_size"], problem["out_size"]
    tiling, pdl = one_row_tiling(in_size, gated=gated), supports_pdl()

    def apply(
        x: Tensor,
        residual: Tensor,
        norm_weight: Tensor,
        eps: float,
        weight: Tensor,
        bias: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        if x.shape[0] != 1:
            return parts(x, residual, norm_weight, eps, weight, bias)
        before = Before(residual, x.new_empty(x.shape), norm_weight, eps)
        y = x.new_empty((1, out_size))
        multiply(x, weight, bias, y, tiling, before=before, gated=gated, is_gelu=is_gelu, pdl=pdl)
        return y, before.total

    blank = partial(precompile.blank, problem["dtype"])
    row, weight = blank(1, in_size), blank(2 * out_size if gated else out_size, in_size)
    precompile.compile_for(apply, row, row, blank(in_size), 0.0, weight, None)
    return apply


@dataclass(frozen=True, slots=True, eq=False)
class Before:
    """The residual add and RMS norm before a GEMV: total = x + residual, then total's RMS norm times `weight`."""

    residual: Tensor
    total: Tensor
    weight: Tensor
    eps: float


def multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    y: Tensor,
    tiling: Tiling,
    *,
    weight_scale: Tensor | None = None,
    before: Before | None = None,
    gated: bool = False,
    is_gelu: bool = False,
    pdl: bool = False,
) -> None:
    """Write y [1, O] = x [1, I] @ weight.T, weight [O or 2O, I], with the given prologue and gating.

    Last dimensions are contiguous. With `weight_scale` (float32 [O or 2O, 1]) the weight is e4m3 with per-channel
    scales, and x is quantized per token. With `pdl` the kernel may start before the previous one has finished.
    """
    in_size, out_size = x.shape[1], y.shape[1]
    added = (
        (None, None, None, 0.0)
        if before is None
        else (before.residual, before.total, before.weight, before.eps)
    )
    one_row[(triton.cdiv(out_size, tiling.block_n),)](
        x,
        *added,
        weight,
        weight_scale,
        bias,
        y,
        weight.stride(0),
        out_size,
        K=in_size,
        NORM=before is not None,
        GATED=gated,
        IS_GELU=is_gelu,
        QUANTIZED=weight_scale is not None,
        HAS_BIAS=bias is not None,
        BLOCK_N=tiling.block_n,
        BLOCK_K=triton.next_power_of_2(in_size),
        PDL=pdl,
        num_warps=tiling.num_warps,
        launch_pdl=pdl,
    )
