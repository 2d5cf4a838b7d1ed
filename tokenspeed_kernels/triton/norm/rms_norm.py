"""The ops `rms_norm` and `add_rms_norm` (arXiv:1910.07467): each tensor is read and written once.

The norm is over the last axis of x [T, N] or [T, H, N], which must be contiguous.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_core.api import Problem
from tokenspeed_kernels.triton import precompile
from tokenspeed_kernels.triton.pdl import supports_pdl


@precompile.jit(do_not_specialize=["num_rows"])
def _rms_norm(
    x_ptr,
    residual_ptr,
    total_ptr,
    weight_ptr,
    y_ptr,
    num_rows,
    eps,
    x_stride_t,
    x_stride_h,
    residual_stride,
    total_stride,
    y_stride,
    NUM_HEADS: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_N)
    mask = (row < num_rows)[:, None] & (column < N)[None, :]
    offset = (row // NUM_HEADS) * x_stride_t + (row % NUM_HEADS) * x_stride_h
    stored = tl.load(x_ptr + offset[:, None] + column[None, :], mask=mask, other=0.0)
    x = stored.to(tl.float32)
    if HAS_RESIDUAL:
        residual = tl.load(
            residual_ptr + row[:, None] * residual_stride + column[None, :], mask=mask, other=0.0
        )
        total = (x + residual.to(tl.float32)).to(stored.dtype)
        tl.store(total_ptr + row[:, None] * total_stride + column[None, :], total, mask=mask)
        x = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / N + eps)
    weight = tl.load(weight_ptr + column, mask=column < N, other=0.0).to(tl.float32)
    y = (x * scale[:, None]).to(stored.dtype).to(tl.float32) * weight[None, :]
    tl.store(y_ptr + row[:, None] * y_stride + column[None, :], y.to(stored.dtype), mask=mask)


def rms_norm(problem: Problem) -> Callable[[Tensor, Tensor, float], Tensor]:
    """Return `norm(x [T, N] or [T, H, N], weight [N], eps) -> y`; x may be strided on its leading axes."""
    shape = _Shape(problem["size"])

    def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        heads = x if x.dim() == 3 else x.reshape(-1, 1, x.shape[-1])
        shape.launch(heads, None, None, weight, y, eps)
        return y

    blank = partial(precompile.blank, problem["dtype"])
    precompile.compile_for(norm, blank(1, problem["size"]), blank(problem["size"]), 0.0)
    return norm


def add_rms_norm(
    problem: Problem,
) -> Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]:
    """Return `norm(x [T, N], residual [T, N], weight [N], eps) -> (y, residual)`, adding into `residual`."""
    shape = _Shape(problem["size"])

    def add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        shape.launch(x.unsqueeze(1), residual, residual, weight, y, eps)
        return y, residual

    precompile_add_norm(add_norm, problem)
    return add_norm


def sum_rms_norm(
    problem: Problem,
) -> Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]:
    """Return `norm(x [T, N], residual [T, N], weight [N], eps) -> (y, x + residual)`; inputs stay unchanged."""
    shape = _Shape(problem["size"])

    def sum_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total, y = torch.empty((2, *x.shape), dtype=x.dtype, device=x.device)
        shape.launch(x.unsqueeze(1), residual, total, weight, y, eps)
        return y, total

    precompile_add_norm(sum_norm, problem)
    return sum_norm


def precompile_add_norm(norm: Callable[..., object], problem: Problem) -> None:
    """Precompile the kernels of `norm(x, residual, weight, eps)`."""
    size: int = problem["size"]
    blank = partial(precompile.blank, problem["dtype"])
    precompile.compile_for(norm, blank(1, size), blank(1, size), blank(size), 0.0)


class _Shape:
    """Launch parameters for one row length. Several short rows share a program."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._block = triton.next_power_of_2(size)
        self._rows = max(1, 1024 // self._block)
        self._num_warps = min(16, max(4, self._block // 512))
        self._pdl = supports_pdl()

    def launch(
        self,
        x: Tensor,
        residual: Tensor | None,
        total: Tensor | None,
        weight: Tensor,
        y: Tensor,
        eps: float,
    ) -> None:
        """Write the RMS norm of x [T, H, N] (plus residual, if given) to contiguous y, and the sum to `total`."""
        num_rows = x.shape[0] * x.shape[1]
        if num_rows == 0:
            return
        _rms_norm[(triton.cdiv(num_rows, self._rows),)](
            x,
            residual,
            total,
            weight,
            y,
            num_rows,
            eps,
            x.stride(0),
            x.stride(1),
            0 if residual is None else residual.stride(0),
            0 if total is None else total.stride(0),
            self._size,
            NUM_HEADS=x.shape[1],
            N=self._size,
            BLOCK_N=self._block,
            BLOCK_ROWS=self._rows,
            HAS_RESIDUAL=residual is not None,
            PDL=self._pdl,
            num_warps=self._num_warps,
            launch_pdl=self._pdl,
        )
