"""Block-scaled linear layers (MXFP8, NVFP4) with the Triton kernel of `block_scaled_kernel`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from tokenspeed_core.api import Problem
from tokenspeed_kernels_blackwell.linear.block_scaled_kernel import multiply

BLOCK_N = 128  # output features per tile, as in one tcgen05 instruction
BLOCK_K = 128  # input features per iteration


@dataclass(frozen=True, slots=True)
class Format:
    """A storage format: its name in Triton, values per element, and values per scale."""

    name: str
    packed: int
    group: int


@dataclass(frozen=True, slots=True)
class Tiling:
    """Tokens per tile, warps, pipeline stages."""

    block_t: int
    num_warps: int
    num_stages: int


MXFP8, NVFP4 = Format("e4m3", 1, 32), Format("e2m1", 2, 16)
# For up to `block_t` tokens; the last also for more.
TILINGS = (Tiling(16, 4, 4), Tiling(64, 4, 4), Tiling(128, 4, 4))

LinearMx = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]
LinearNv = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]


def linear_mxfp8(problem: Problem) -> LinearMx:
    """Return `linear(x, x_scale, weight, weight_scale, bias) -> y [T, O]`; see the op's contract for shapes."""
    dtype: torch.dtype = getattr(torch, problem["dtype"])

    def linear(
        x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None
    ) -> Tensor:
        return _multiply(MXFP8, x, x_scale, weight, weight_scale, None, bias, dtype)

    return linear


def linear_nvfp4(problem: Problem) -> LinearNv:
    """Return `linear(x, x_scale, weight, weight_scale, scale, bias) -> y [T, O]`; see the op's contract."""
    dtype: torch.dtype = getattr(torch, problem["dtype"])

    def linear(
        x: Tensor,
        x_scale: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        scale: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        return _multiply(NVFP4, x, x_scale, weight, weight_scale, scale, bias, dtype)

    return linear


def _multiply(
    form: Format,
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return y [T, O] of `dtype`. Rows of x and its scales may be strided; the weight and its scales are contiguous."""
    num_rows, out_size = x.shape[0], weight.shape[0]
    y = torch.empty((num_rows, out_size), dtype=dtype, device=x.device)
    if num_rows == 0:
        return y
    tiling = next((each for each in TILINGS if num_rows <= each.block_t), TILINGS[-1])
    multiply[(triton.cdiv(out_size, BLOCK_N), triton.cdiv(num_rows, tiling.block_t))](
        x,
        x_scale,
        weight,
        weight_scale,
        scale,
        bias,
        y,
        x.stride(0),
        x_scale.stride(0),
        num_rows,
        out_size,
        K=x.shape[1] * form.packed,
        FORMAT=form.name,
        PACKED=form.packed,
        GROUP=form.group,
        HAS_SCALE=scale is not None,
        HAS_BIAS=bias is not None,
        BLOCK_N=BLOCK_N,
        BLOCK_T=tiling.block_t,
        BLOCK_K=BLOCK_K,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    return y
