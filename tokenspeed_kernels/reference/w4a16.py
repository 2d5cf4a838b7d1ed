"""Linear layers with 4-bit weights and unquantized activations: integers (W4A16), or floats (MXFP4).

AWQ, GPTQ and compressed-tensors checkpoints are repacked into one layout: [O, I / 2] bytes, where byte 16 r + j of a
row holds column 32 r + j in its low bits and column 32 r + 16 + j in its high bits. A tile of bytes then splits into
two tiles of columns without a shuffle, and both read x in runs of 16. MXFP4 has the same layout of E2M1 codes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from tokenspeed_core.api import Problem

RUN = 16  # columns in the low bits of adjacent bytes
MIDDLE = 8  # the zero point of symmetric weights

MX_GROUP = 32

LinearMxfp4 = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
LinearW4A16 = Callable[
    [Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None], Tensor
]


def pack_int4(codes: Tensor) -> Tensor:
    """Return codes [..., O, I] from 0 to 15 as bytes [..., O, I / 2]."""
    runs = codes.to(torch.uint8).reshape(*codes.shape[:-1], -1, 2, RUN)
    packed = runs[..., 0, :] | runs[..., 1, :] << 4
    return packed.flatten(-2)


def unpack_int4(weight: Tensor) -> Tensor:
    """Return bytes [..., O, I / 2] as codes uint8 [..., O, I] from 0 to 15."""
    runs = weight.reshape(*weight.shape[:-1], -1, 1, RUN)
    return torch.cat((runs & 15, runs >> 4), dim=-2).flatten(-3)


def dequantize_int4(weight: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """Return the values [..., O, I], float32, of bytes with scales and zero points [..., O, I / G]."""
    codes = unpack_int4(weight).reshape(*scale.shape, -1).to(torch.float32)
    middle: Tensor | int = MIDDLE if zero is None else zero.unsqueeze(-1).to(torch.float32)
    values = (codes - middle) * scale.unsqueeze(-1).to(torch.float32)
    return values.flatten(-2)


def linear_w4a16(problem: Problem) -> LinearW4A16:
    """Return `linear(x, weight, scale, zero, order, bias) -> y [T, O]`; each call dequantizes the weight."""
    dtype: torch.dtype = getattr(torch, problem["dtype"])

    def linear(
        x: Tensor,
        weight: Tensor,
        scale: Tensor,
        zero: Tensor | None,
        order: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        wide = x.to(torch.float32)
        if order is not None:
            wide = wide.index_select(1, order)
        y = functional.linear(wide, dequantize_int4(weight, scale, zero))
        return (y if bias is None else y.add_(bias)).to(dtype)

    return linear


def e2m1(codes: Tensor) -> Tensor:
    """Return the values, float32, of E2M1 codes: a sign, two bits of exponent, one of mantissa.

    Computed, because a captured CUDA graph cannot copy a table to the device. Source: OCP Microscaling Formats (MX)
    Specification, version 1.0.
    """
    exponent, mantissa = (codes >> 1 & 3).to(torch.int32), (codes & 1).to(torch.float32) / 2
    magnitude = torch.where(exponent == 0, mantissa, torch.ldexp(1 + mantissa, exponent - 1))
    return torch.where(codes >= 8, -magnitude, magnitude)


def dequantize_e2m1(weight: Tensor, scale: Tensor) -> Tensor:
    """Return the values [..., O, I], float32, of bytes of E2M1 codes with scales uint8 [..., O, I / 32].

    A scale is an exponent with a bias of 127 (E8M0).
    """
    values = e2m1(unpack_int4(weight)).reshape(*scale.shape, -1)
    return torch.ldexp(values, scale.unsqueeze(-1).int() - 127).flatten(-2)


def linear_mxfp4(problem: Problem) -> LinearMxfp4:
    """Return `linear(x, weight, scale, bias) -> y [T, O]`; each call dequantizes the weight."""
    dtype: torch.dtype = getattr(torch, problem["dtype"])

    def linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        y = functional.linear(x.to(torch.float32), dequantize_e2m1(weight, scale))
        return (y if bias is None else y.add_(bias)).to(dtype)

    return linear
