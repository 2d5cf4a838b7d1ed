"""Block-scaled linear layers (MXFP8, NVFP4) in plain torch, the reference on any device.

MXFP8 follows the OCP Microscaling specification 1.0 (arXiv:2310.10537), with scales rounded up so that no value
saturates. NVFP4 follows arXiv:2509.25149.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from tokenspeed_core.api import Problem

E4M3_MAX, E2M1_MAX = 448.0, 6.0
MX_GROUP, NV_GROUP = 32, 16
E8M0_BIAS = 127
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # values by code; the fourth bit is the sign

Quantized = tuple[Tensor, Tensor]


def mxfp8_rows(x: Tensor) -> Quantized:
    """Return x [T, N] as float8_e4m3fn [T, N] and scale exponents uint8 [T, N / 32] with a bias of 127."""
    groups = _groups(x.to(torch.float32), MX_GROUP)
    mantissa, exponent = torch.frexp(groups.abs().amax(dim=-1))
    # frexp returns mantissas in [0.5, 1).
    exponent = exponent - 9 + (mantissa > E4M3_MAX / 2**9).to(torch.int32)
    exponent = exponent.clamp(-E8M0_BIAS, E8M0_BIAS)
    exponent = torch.where(mantissa == 0, -E8M0_BIAS, exponent)
    # Exactly 2^-exponent; pow on a device may be off by a bit.
    factor = ((E8M0_BIAS - exponent) << 23).view(torch.float32)
    codes = (groups * factor.unsqueeze(-1)).flatten(-2).to(torch.float8_e4m3fn)
    return codes, (exponent + E8M0_BIAS).to(torch.uint8)


def mxfp8_values(codes: Tensor, scale: Tensor) -> Tensor:
    """Dequantize the result of `mxfp8_rows` to float32."""
    exponent = scale.to(torch.int32) - E8M0_BIAS
    groups = _groups(codes.to(torch.float32), MX_GROUP)
    return torch.ldexp(groups, exponent.unsqueeze(-1)).flatten(-2)


def nvfp4_rows(x: Tensor, scale: Tensor) -> Quantized:
    """Return x [T, N] as e2m1 in uint8 [T, N / 2], the first value in the low bits, and e4m3 scales [T, N / 16].

    `scale`, float32 [1], is the per-tensor scale: above 0, and at least the largest magnitude / 2688.
    """
    groups = _groups(x.to(torch.float32), NV_GROUP)
    # A tensor, because division by a Python number rounds differently on a device.
    largest_code = torch.full_like(scale, E2M1_MAX)
    largest = groups.abs().amax(dim=-1) / largest_code / scale
    group_scale = largest.clamp_(max=E4M3_MAX).to(torch.float8_e4m3fn)
    divisor = (group_scale.to(torch.float32) * scale).unsqueeze(-1)
    scaled = torch.where(divisor == 0, 0.0, groups / divisor).flatten(-2)
    codes = _nearest_e2m1(scaled.abs()) | (scaled < 0).to(torch.uint8) << 3
    return codes[..., 0::2] | codes[..., 1::2] << 4, group_scale


def nvfp4_values(codes: Tensor, scale: Tensor) -> Tensor:
    """Dequantize the result of `nvfp4_rows` to float32, without the per-tensor scale."""
    each = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2).to(torch.int32)
    low = each & 7
    # Twice the value, computed from exponent and mantissa: copying a table to the device cannot be captured in a graph.
    twice = torch.where(low < 2, low, (2 + low % 2) << (low // 2 - 1).clamp(min=0)).to(
        torch.float32
    )
    values = _groups(torch.where(each >= 8, -twice, twice) / 2, NV_GROUP)
    return (values * scale.to(torch.float32).unsqueeze(-1)).flatten(-2)


def quantize_mxfp8(problem: Problem) -> Callable[[Tensor], Quantized]:
    """Return `quantize(x [T, N]) -> (y float8_e4m3fn [T, N], scale uint8 [T, N / 32])`."""
    del problem  # the size is that of the rows
    return mxfp8_rows


def quantize_nvfp4(problem: Problem) -> Callable[[Tensor, Tensor], Quantized]:
    """Return `quantize(x [T, N], scale [1]) -> (y uint8 [T, N / 2], scale float8_e4m3fn [T, N / 16])`."""
    del problem
    return nvfp4_rows


def linear_mxfp8(
    problem: Problem,
) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]:
    """Return `linear(x, x_scale, weight, weight_scale, bias) -> y [T, O]`; each call widens both to float32."""
    dtype: torch.dtype = getattr(torch, problem["dtype"])

    def linear(
        x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None
    ) -> Tensor:
        y = functional.linear(mxfp8_values(x, x_scale), mxfp8_values(weight, weight_scale))
        return (y if bias is None else y.add_(bias)).to(dtype)

    return linear


def linear_nvfp4(
    problem: Problem,
) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]:
    """Return `linear(x, x_scale, weight, weight_scale, scale, bias) -> y [T, O]`; each call widens both to float32."""
    dtype: torch.dtype = getattr(torch, problem["dtype"])

    def linear(
        x: Tensor,
        x_scale: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        scale: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        y = functional.linear(nvfp4_values(x, x_scale), nvfp4_values(weight, weight_scale)).mul_(
            scale
        )
        return (y if bias is None else y.add_(bias)).to(dtype)

    return linear


def _groups(x: Tensor, size: int) -> Tensor:
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)


def _nearest_e2m1(magnitude: Tensor) -> Tensor:
    """Return the codes of the nearest values. Ties round to the even code; large values saturate."""
    codes = torch.zeros(magnitude.shape, dtype=torch.uint8, device=magnitude.device)
    for code, (low, high) in enumerate(pairwise(E2M1)):
        middle = (low + high) / 2
        codes += (magnitude >= middle if code % 2 else magnitude > middle).to(torch.uint8)
    return codes
