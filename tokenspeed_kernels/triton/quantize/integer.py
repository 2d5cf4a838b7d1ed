"""Quantize rows x [T, N] to INT8 with one scale per row, and to INT8 or FP8 (e4m3) with a given scale."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_core.api import Problem
from tokenspeed_kernels.triton import precompile
from tokenspeed_kernels.triton.pdl import supports_pdl

E4M3_MAX = tl.constexpr(448.0)
INT8_MAX = tl.constexpr(127.0)
MIN_AMAX = tl.constexpr(1e-10)
ROUND = tl.constexpr(
    12582912.0
)  # 1.5 * 2^23: adding and subtracting it rounds a float32 to an integer

QuantizeStatic = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@precompile.jit
def _quantize(
    x_ptr,
    given_ptr,
    y_ptr,
    scale_ptr,
    x_stride,
    N: tl.constexpr,
    IS_STATIC: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Quantize one row per program."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < N
    x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    if IS_STATIC:
        scale = tl.load(given_ptr)
    else:
        scale = tl.maximum(tl.max(tl.abs(x), axis=0), MIN_AMAX) / INT8_MAX
    y = x / scale
    if y_ptr.dtype.element_ty == tl.int8:
        y = tl.minimum(tl.maximum(y, -INT8_MAX - 1), INT8_MAX)
        codes = ((y + ROUND) - ROUND).to(tl.int8)
    else:
        codes = tl.minimum(tl.maximum(y, -E4M3_MAX), E4M3_MAX).to(tl.float8e4nv)
    tl.store(y_ptr + row * N + column, codes, mask=mask)
    tl.store(scale_ptr + row, scale)


class _Rows:
    """Launches for rows of one size."""

    def __init__(self, problem: Problem, dtype: torch.dtype, *, is_static: bool = True) -> None:
        self._size, self._dtype = problem["size"], dtype
        block = triton.next_power_of_2(self._size)
        pdl = supports_pdl()
        self._launch = {
            "N": self._size,
            "BLOCK": block,
            "PDL": pdl,
            "num_warps": min(16, max(4, block // 512)),
            "launch_pdl": pdl,
        }
        row = precompile.blank(problem["dtype"], 1, self._size)
        given = precompile.blank("float32", 1) if is_static else None
        precompile.compile_for(self, row, given)

    def __call__(self, x: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the codes [T, N] and the scale of each row [T, 1], which is `scale` [1] if it is given."""
        y = x.new_empty((x.shape[0], self._size), dtype=self._dtype)
        scales = x.new_empty((x.shape[0], 1), dtype=torch.float32)
        if x.shape[0]:
            _quantize[(x.shape[0],)](
                x, scale, y, scales, x.stride(0), IS_STATIC=scale is not None, **self._launch
            )
        return y, scales


def quantize_int8(problem: Problem) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Return `quantize(x [T, N]) -> (y int8 [T, N], scale float32 [T, 1])`."""
    rows = _Rows(problem, torch.int8, is_static=False)
    return lambda x: rows(x, None)


def quantize_int8_static(problem: Problem) -> QuantizeStatic:
    """Return `quantize(x [T, N], scale float32 [1]) -> (y int8 [T, N], scale float32 [T, 1])`."""
    return _Rows(problem, torch.int8)


def quantize_fp8_static(problem: Problem) -> QuantizeStatic:
    """Return `quantize(x [T, N], scale float32 [1]) -> (y float8_e4m3fn [T, N], scale float32 [T, 1])`."""
    return _Rows(problem, torch.float8_e4m3fn)
