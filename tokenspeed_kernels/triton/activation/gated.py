"""The ops `silu_mul` and `gelu_tanh_mul`: SwiGLU and GeGLU (Shazeer, 2020, arXiv:2002.05202).

A row of x [T, 2N] is the gate, then up; y is [T, N]. GELU is the tanh approximation.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_core.api import Problem
from tokenspeed_kernels.triton import precompile
from tokenspeed_kernels.triton.pdl import supports_pdl

BLOCK = 1024


@triton.jit
def activated(x, IS_GELU: tl.constexpr):
    """Return silu(x) or gelu(x) of float32 x.

    Both are x * sigmoid(z): (1 + tanh(u)) / 2, which approximates the normal distribution in GELU, is sigmoid(2 u).
    """
    z = 1.5957691216057308 * (x + 0.044715 * x * x * x) if IS_GELU else x
    return x / (1.0 + tl.exp(-z))


@precompile.jit
def _gated_mul(
    x_ptr,
    y_ptr,
    x_stride,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_GELU: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < N
    stored = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0)
    up = tl.load(x_ptr + row * x_stride + N + column, mask=mask, other=0.0).to(tl.float32)
    gate = activated(stored.to(tl.float32), IS_GELU).to(stored.dtype).to(tl.float32)
    tl.store(y_ptr + row * N + column, (gate * up).to(stored.dtype), mask=mask)


def silu_mul(problem: Problem) -> Callable[[Tensor], Tensor]:
    """Return `silu_mul(x [T, 2N]) -> y [T, N]`: silu of the first half of each row times the second half."""
    return _gated(problem, is_gelu=False)


def gelu_tanh_mul(problem: Problem) -> Callable[[Tensor], Tensor]:
    """Return `gelu_tanh_mul(x [T, 2N]) -> y [T, N]`: gelu of the first half of each row times the second half."""
    return _gated(problem, is_gelu=True)


def _gated(problem: Problem, *, is_gelu: bool) -> Callable[[Tensor], Tensor]:
    size: int = problem["size"]
    block = min(BLOCK, triton.next_power_of_2(size))
    pdl = supports_pdl()

    def gate_halves(x: Tensor) -> Tensor:
        y = torch.empty((x.shape[0], size), dtype=x.dtype, device=x.device)
        if x.shape[0]:
            grid = (x.shape[0], triton.cdiv(size, block))
            _gated_mul[grid](
                x, y, x.stride(0), N=size, BLOCK=block, IS_GELU=is_gelu, PDL=pdl, launch_pdl=pdl
            )
        return y

    precompile.compile_for(gate_halves, precompile.blank(problem["dtype"], 1, 2 * size))
    return gate_halves
