"""Quantize rows to FP8 (e4m3) with one scale per row (per token): alone, after an RMS norm, or after SwiGLU.

x is [T, N], or [T, 2N] before SwiGLU; codes are [T, N] and scales [T, 1]. A program holds a whole row, because the
scale depends on all of it. Values are rounded to the dtype before they are
quantized, so a fused kernel gives the same result as separate ones.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_core.api import Problem
from tokenspeed_kernels.triton import precompile
from tokenspeed_kernels.triton.norm.rms_norm import precompile_add_norm
from tokenspeed_kernels.triton.pdl import supports_pdl

E4M3_MAX = tl.constexpr(448.0)
MIN_AMAX = tl.constexpr(1e-10)


@triton.jit
def scale_of_row(x):
    """Return the scale of a float32 row x, which is zero where masked."""
    return tl.maximum(tl.max(tl.abs(x), axis=0), MIN_AMAX) / E4M3_MAX


@triton.jit
def normalized(total, squares, weight, eps, N: tl.constexpr):
    """Return the RMS norm of `total`, given its sum of squares, as float32 rounded to the dtype of `total`."""
    y = (total.to(tl.float32) * tl.rsqrt(squares / N + eps)).to(total.dtype).to(
        tl.float32
    ) * weight.to(tl.float32)
    return y.to(total.dtype).to(tl.float32)


@triton.jit
def gated(gate, up):
    """Return silu(gate) * up as float32 rounded to the dtype of `gate`."""
    wide = gate.to(tl.float32)
    activated = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    return (activated * up.to(tl.float32)).to(gate.dtype).to(tl.float32)


@triton.jit
def quantize_row(x):
    """Return the codes and the scale of a float32 row x, which is zero where masked."""
    scale = scale_of_row(x)
    y = tl.minimum(tl.maximum(x / scale, -E4M3_MAX), E4M3_MAX)
    return y.to(tl.float8e4nv), scale


@triton.jit
def _store_quantized(x, y_ptr, scale_ptr, row, column, mask, N: tl.constexpr):
    """Quantize and store a float32 row x, which is zero where masked, and its scale."""
    codes, scale = quantize_row(x)
    tl.store(y_ptr + row * N + column, codes, mask=mask)
    tl.store(scale_ptr + row, scale)


@precompile.jit
def _quantize(
    x_ptr, y_ptr, scale_ptr, x_stride, N: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < N
    x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    _store_quantized(x, y_ptr, scale_ptr, row, column, mask, N)


@precompile.jit
def _add_rms_norm(
    x_ptr,
    residual_ptr,
    total_ptr,
    weight_ptr,
    y_ptr,
    scale_ptr,
    x_stride,
    residual_stride,
    total_stride,
    eps,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < N
    stored = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0)
    residual = tl.load(residual_ptr + row * residual_stride + column, mask=mask, other=0.0)
    total = (stored.to(tl.float32) + residual.to(tl.float32)).to(stored.dtype)
    tl.store(total_ptr + row * total_stride + column, total, mask=mask)
    wide = total.to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0)
    y = normalized(total, tl.sum(wide * wide, axis=0), weight, eps, N)
    _store_quantized(y, y_ptr, scale_ptr, row, column, mask, N)


@precompile.jit
def _silu_mul(
    x_ptr, y_ptr, scale_ptr, x_stride, N: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < N
    gate = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0)
    up = tl.load(x_ptr + row * x_stride + N + column, mask=mask, other=0.0)
    _store_quantized(gated(gate, up), y_ptr, scale_ptr, row, column, mask, N)


class _Rows:
    """Launches for rows of one size, with their output buffers."""

    def __init__(self, size: int) -> None:
        self.size = size
        block = triton.next_power_of_2(size)
        pdl = supports_pdl()
        self.launch = {
            "N": size,
            "BLOCK": block,
            "PDL": pdl,
            "num_warps": min(16, max(4, block // 512)),
            "launch_pdl": pdl,
        }

    def outputs(self, num_rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Allocate e4m3 rows [T, N] and float32 scales [T, 1]."""
        y = torch.empty((num_rows, self.size), dtype=torch.float8_e4m3fn, device=device)
        return y, torch.empty((num_rows, 1), dtype=torch.float32, device=device)

    def add_norm(
        self, x: Tensor, residual: Tensor, total: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Write x + residual to `total`. Return its RMS norm quantized, the scales, and `total`."""
        y, scale = self.outputs(x.shape[0], x.device)
        if x.shape[0]:
            _add_rms_norm[(x.shape[0],)](
                x,
                residual,
                total,
                weight,
                y,
                scale,
                x.stride(0),
                residual.stride(0),
                total.stride(0),
                eps,
                **self.launch,
            )
        return y, scale, total


def quantize_fp8(problem: Problem) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Return `quantize(x [T, N]) -> (y float8_e4m3fn [T, N], scale float32 [T, 1])`."""
    rows = _Rows(problem["size"])

    def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
        y, scale = rows.outputs(x.shape[0], x.device)
        if x.shape[0]:
            _quantize[(x.shape[0],)](x, y, scale, x.stride(0), **rows.launch)
        return y, scale

    precompile.compile_for(quantize, precompile.blank(problem["dtype"], 1, rows.size))
    return quantize


def add_rms_norm_fp8(
    problem: Problem,
) -> Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor, Tensor]]:
    """Return `norm(x [T, N], residual, weight, eps) -> (y float8_e4m3fn, scale [T, 1], residual)`."""
    rows = _Rows(problem["size"])

    def norm(
        x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        return rows.add_norm(x, residual, residual, weight, eps)

    precompile_add_norm(norm, problem)
    return norm


def sum_rms_norm_fp8(
    problem: Problem,
) -> Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor, Tensor]]:
    """Return `norm(x [T, N], residual, weight, eps) -> (y float8_e4m3fn, scale, x + residual)`; inputs stay unchanged."""
    rows = _Rows(problem["size"])

    def norm(
        x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        return rows.add_norm(x, residual, residual.new_empty(residual.shape), weight, eps)

    precompile_add_norm(norm, problem)
    return norm


def silu_mul_fp8(problem: Problem) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Return `silu_mul(x [T, 2N]) -> (y float8_e4m3fn [T, N], scale float32 [T, 1])`."""
    rows = _Rows(problem["size"])

    def silu_mul(x: Tensor) -> tuple[Tensor, Tensor]:
        y, scale = rows.outputs(x.shape[0], x.device)
        if x.shape[0]:
            _silu_mul[(x.shape[0],)](x, y, scale, x.stride(0), **rows.launch)
        return y, scale

    precompile.compile_for(silu_mul, precompile.blank(problem["dtype"], 1, 2 * rows.size))
    return silu_mul
