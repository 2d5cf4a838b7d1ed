"""SwiGLU activation: silu(gate) * up."""

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


@precompile.jit
def _silu_mul(x_ptr, y_ptr, x_stride, N: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < N
    stored = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0)
    gate = stored.to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + N + column, mask=mask, other=0.0).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(stored.dtype).to(tl.float32)
    tl.store(y_ptr + row * N + column, (activated * up).to(stored.dtype), mask=mask)


def silu_mul(problem: Problem) -> Callable[[Tensor], Tensor]:
    """Return `silu_mul(x [T, 2N]) -> y [T, N]`: silu of the first half of each row times the second half."""
    size: int = problem["size"]
    block = min(BLOCK, triton.next_power_of_2(size))
    pdl = supports_pdl()

    def silu_mul_halves(x: Tensor) -> Tensor:
        y = torch.empty((x.shape[0], size), dtype=x.dtype, device=x.device)
        if x.shape[0]:
            grid = (x.shape[0], triton.cdiv(size, block))
            _silu_mul[grid](x, y, x.stride(0), N=size, BLOCK=block, PDL=pdl, launch_pdl=pdl)
        return y

    precompile.compile_for(silu_mul_halves, precompile.blank(problem["dtype"], 1, 2 * size))
    return silu_mul_halves
