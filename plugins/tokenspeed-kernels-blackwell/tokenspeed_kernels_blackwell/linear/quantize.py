"""Quantization to MXFP8 and NVFP4 with the Triton kernels of `quantize_kernel`."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
from torch import Tensor

from tokenspeed_core.api import Problem
from tokenspeed_kernels_blackwell.linear import quantize_kernel as kernel

BLOCK = 64  # groups per program
MX_GROUP, NV_GROUP = 32, 16

Quantized = tuple[Tensor, Tensor]


def mxfp8_rows(x: Tensor) -> Quantized:
    """Return x [T, N] as float8_e4m3fn [T, N] and scale exponents uint8 [T, N / 32]. Rows may be strided."""
    num_rows, size = x.shape
    codes = torch.empty((num_rows, size), dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty((num_rows, size // MX_GROUP), dtype=torch.uint8, device=x.device)
    if num_rows:
        groups = size // MX_GROUP
        block = min(BLOCK, triton.next_power_of_2(groups))
        kernel.to_mxfp8[(num_rows, triton.cdiv(groups, block))](
            x, codes, scale, x.stride(0), GROUPS=groups, BLOCK=block
        )
    return codes, scale


def nvfp4_rows(x: Tensor, scale: Tensor) -> Quantized:
    """Return x [T, N] as e2m1 in uint8 [T, N / 2] and e4m3 scales [T, N / 16]; `scale` is the per-tensor scale."""
    num_rows, size = x.shape
    codes = torch.empty((num_rows, size // 2), dtype=torch.uint8, device=x.device)
    group_scale = torch.empty(
        (num_rows, size // NV_GROUP), dtype=torch.float8_e4m3fn, device=x.device
    )
    if num_rows:
        groups = size // NV_GROUP
        block = min(BLOCK, triton.next_power_of_2(groups))
        kernel.to_nvfp4[(num_rows, triton.cdiv(groups, block))](
            x, codes, group_scale, scale, x.stride(0), GROUPS=groups, BLOCK=block
        )
    return codes, group_scale


def quantize_mxfp8(problem: Problem) -> Callable[[Tensor], Quantized]:
    """Return `quantize(x [T, N]) -> (y float8_e4m3fn [T, N], scale uint8 [T, N / 32])`."""
    del problem
    return mxfp8_rows


def quantize_nvfp4(problem: Problem) -> Callable[[Tensor, Tensor], Quantized]:
    """Return `quantize(x [T, N], scale [1]) -> (y uint8 [T, N / 2], scale float8_e4m3fn [T, N / 16])`."""
    del problem
    return nvfp4_rows
