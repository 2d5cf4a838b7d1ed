"""FP8 (e4m3) linear layers with block-wise scales, as in DeepSeek-V3 (arXiv:2412.19437).

Weights have one scale per 128 x 128 block; activations are quantized dynamically, with one scale per 128 elements.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from tokenspeed_core.api import Problem
from tokenspeed_kernels.reference.activation import silu_mul
from tokenspeed_kernels.reference.fp8 import E4M3_MAX, MIN_AMAX, AddNorm, Quantize
from tokenspeed_kernels.reference.norm import add_rms_norm

BLOCK = 128  # side of a weight's scale blocks, and elements of an activation row that share a scale

Linear = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]


def quantize_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x [T, N] as float8_e4m3fn [T, N] and float32 scales [T, ceil(N / 128)]."""
    wide = functional.pad(x.to(torch.float32), (0, -x.shape[1] % BLOCK))
    groups = wide.reshape(x.shape[0], wide.shape[1] // BLOCK, BLOCK)
    scale = groups.abs().amax(dim=-1).clamp_(min=MIN_AMAX).div_(E4M3_MAX)
    codes = (groups / scale.unsqueeze(-1)).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes.reshape(wide.shape)[:, : x.shape[1]].contiguous(), scale


def quantize_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight [O, I] as float8_e4m3fn [O, I] and float32 scales [ceil(O / 128), ceil(I / 128)]."""
    wide = weight.to(torch.float32)
    padded = functional.pad(wide, (0, -weight.shape[1] % BLOCK, 0, -weight.shape[0] % BLOCK))
    tiles = padded.reshape(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    scale = tiles.abs().amax(dim=(1, 3)).clamp_(min=MIN_AMAX).div_(E4M3_MAX)
    codes = (wide / spread_blocks(scale, weight.shape[0], weight.shape[1])).clamp_(
        -E4M3_MAX, E4M3_MAX
    )
    return codes.to(torch.float8_e4m3fn), scale


def spread_groups(scale: Tensor, size: int) -> Tensor:
    """Expand scales of groups [..., groups] to one scale per feature [..., size]."""
    return scale.repeat_interleave(BLOCK, dim=-1)[..., :size]


def spread_blocks(scale: Tensor, num_rows: int, size: int) -> Tensor:
    """Expand scales of blocks to one scale per element of a weight [num_rows, size]."""
    return spread_groups(scale, size).repeat_interleave(BLOCK, dim=0)[:num_rows]


def quantize_fp8_groups(problem: Problem) -> Quantize:
    """Return `quantize(x [T, N]) -> (y float8_e4m3fn [T, N], scale float32 [T, ceil(N / 128)])`."""
    del problem
    return quantize_groups


def add_rms_norm_fp8_groups(problem: Problem) -> AddNorm:
    """Return `norm(x [T, N], residual, weight, eps) -> (y float8_e4m3fn, scale [T, ceil(N / 128)], residual)`."""
    norm = add_rms_norm(problem)

    def add_norm(
        x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        return *quantize_groups(norm(x, residual, weight, eps)[0]), residual

    return add_norm


def silu_mul_fp8_groups(problem: Problem) -> Quantize:
    """Return `silu_mul(x [T, 2N]) -> (y float8_e4m3fn [T, N], scale float32 [T, ceil(N / 128)])`."""
    plain = silu_mul(problem)
    return lambda x: quantize_groups(plain(x))


def quantize_fp8_blocks(problem: Problem) -> Quantize:
    """Return `quantize(weight [O, N]) -> (y float8_e4m3fn [O, N], scale float32 [ceil(O / 128), ceil(N / 128)])`."""
    del problem
    return quantize_blocks


def linear_fp8_block(problem: Problem) -> Linear:
    """Return `linear(x, x_scale, weight, weight_scale, bias) -> y [T, O]`; each call widens both to float32."""
    dtype: torch.dtype = getattr(torch, problem["dtype"])

    def linear(
        x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None
    ) -> Tensor:
        out_size, in_size = weight.shape
        wide = x.to(torch.float32) * spread_groups(x_scale, in_size)
        y = functional.linear(
            wide, weight.to(torch.float32) * spread_blocks(weight_scale, out_size, in_size)
        )
        return (y if bias is None else y.add_(bias)).to(dtype)

    return linear
