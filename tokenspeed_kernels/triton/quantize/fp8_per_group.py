"""Quantize rows to FP8 (e4m3) with one scale per 128 elements: alone, after an RMS norm, or after SwiGLU.

x is [T, N], or [T, 2N] before SwiGLU; codes are [T, N] and scales [T, ceil(N / 128)]. Values are rounded to the dtype
before they are quantized, so a fused kernel gives the same result as separate ones.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_core.api import Problem
from tokenspeed_kernels.reference.fp8 import AddNorm, Quantize
from tokenspeed_kernels.triton import precompile
from tokenspeed_kernels.triton.norm.rms_norm import precompile_add_norm
from tokenspeed_kernels.triton.pdl import supports_pdl
from tokenspeed_kernels.triton.quantize.fp8_per_token import E4M3_MAX, MIN_AMAX, gated, normalized

GROUP = 128  # elements of a row that share a scale; also the side of a weight's scale blocks
GROUPS_AT_ONCE = 8  # groups per program, unless it needs the whole row


@triton.jit
def quantize_groups(x):
    """Return the codes of float32 x [groups, 128], which is zero beyond the end of the row, and its scales [groups]."""
    scale = tl.maximum(tl.max(tl.abs(x), axis=1), MIN_AMAX) / E4M3_MAX
    y = tl.minimum(tl.maximum(x / scale[:, None], -E4M3_MAX), E4M3_MAX)
    return y.to(tl.float8e4nv), scale


@triton.jit
def _store_groups(
    x, y_ptr, scale_ptr, row, group, column, N: tl.constexpr, NUM_GROUPS: tl.constexpr
):
    """Quantize and store float32 x [groups, 128], which is zero beyond the end of the row, and its scales."""
    codes, scale = quantize_groups(x)
    tl.store(y_ptr + row * N + column, codes, mask=column < N)
    tl.store(scale_ptr + row * NUM_GROUPS + group, scale, mask=group < NUM_GROUPS)


@precompile.jit
def _quantize(
    x_ptr,
    y_ptr,
    scale_ptr,
    x_stride,
    N: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    AT_ONCE: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Quantize rows.

    Grid (T, tiles of AT_ONCE groups). GATED: rows are 2N long, and silu(first half) * second half is
    quantized.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    stored = tl.load(x_ptr + row * x_stride + column, mask=column < N, other=0.0)
    if GATED:
        x = gated(stored, tl.load(x_ptr + row * x_stride + N + column, mask=column < N, other=0.0))
    else:
        x = stored.to(tl.float32)
    _store_groups(x, y_ptr, scale_ptr, row, group, column, N, NUM_GROUPS)


@precompile.jit
def _add_rms_norm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    scale_ptr,
    x_stride,
    residual_stride,
    eps,
    N: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PDL: tl.constexpr,
):
    """residual += x; quantize its RMS norm. Grid (T): a program holds a whole row."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, AT_ONCE)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    mask = column < N
    stored = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0)
    residual = tl.load(residual_ptr + row * residual_stride + column, mask=mask, other=0.0)
    total = (stored.to(tl.float32) + residual.to(tl.float32)).to(stored.dtype)
    tl.store(residual_ptr + row * residual_stride + column, total, mask=mask)
    wide = total.to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0)
    y = normalized(total, tl.sum(tl.sum(wide * wide, axis=1), axis=0), weight, eps, N)
    _store_groups(y, y_ptr, scale_ptr, row, group, column, N, NUM_GROUPS)


class _Rows:
    """Launches for rows of one size, with their output buffers."""

    def __init__(self, size: int) -> None:
        self.size, self.num_groups, pdl = size, triton.cdiv(size, GROUP), supports_pdl()
        self.launch = {
            "N": size,
            "NUM_GROUPS": self.num_groups,
            "GROUP": GROUP,
            "PDL": pdl,
            "launch_pdl": pdl,
        }

    def outputs(self, num_rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Allocate e4m3 rows [T, N] and float32 scales [T, ceil(N / 128)]."""
        y = torch.empty((num_rows, self.size), dtype=torch.float8_e4m3fn, device=device)
        return y, torch.empty((num_rows, self.num_groups), dtype=torch.float32, device=device)

    def quantize(self, x: Tensor, *, is_gated: bool) -> tuple[Tensor, Tensor]:
        """Return x ([T, N], or [T, 2N] if gated) quantized, and its scales."""
        y, scale = self.outputs(x.shape[0], x.device)
        if x.shape[0]:
            _quantize[(x.shape[0], triton.cdiv(self.num_groups, GROUPS_AT_ONCE))](
                x, y, scale, x.stride(0), AT_ONCE=GROUPS_AT_ONCE, GATED=is_gated, **self.launch
            )
        return y, scale


def quantize_fp8_groups(problem: Problem) -> Quantize:
    """Return `quantize(x [T, N]) -> (y float8_e4m3fn [T, N], scale float32 [T, ceil(N / 128)])`."""
    rows = _Rows(problem["size"])
    quantize = partial(rows.quantize, is_gated=False)
    precompile.compile_for(quantize, precompile.blank(problem["dtype"], 1, rows.size))
    return quantize


def silu_mul_fp8_groups(problem: Problem) -> Quantize:
    """Return `silu_mul(x [T, 2N]) -> (y float8_e4m3fn [T, N], scale float32 [T, ceil(N / 128)])`."""
    rows = _Rows(problem["size"])
    silu_mul = partial(rows.quantize, is_gated=True)
    precompile.compile_for(silu_mul, precompile.blank(problem["dtype"], 1, 2 * rows.size))
    return silu_mul


def add_rms_norm_fp8_groups(problem: Problem) -> AddNorm:
    """Return `norm(x [T, N], residual, weight, eps) -> (y float8_e4m3fn, scale [T, ceil(N / 128)], residual)`."""
    rows = _Rows(problem["size"])
    at_once = triton.next_power_of_2(rows.num_groups)
    num_warps = min(16, max(4, at_once * GROUP // 512))

    def norm(
        x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        y, scale = rows.outputs(x.shape[0], x.device)
        if x.shape[0]:
            _add_rms_norm[(x.shape[0],)](
                x,
                residual,
                weight,
                y,
                scale,
                x.stride(0),
                residual.stride(0),
                eps,
                AT_ONCE=at_once,
                num_warps=num_warps,
                **rows.launch,
            )
        return y, scale, residual

    precompile_add_norm(norm, problem)
    return norm
