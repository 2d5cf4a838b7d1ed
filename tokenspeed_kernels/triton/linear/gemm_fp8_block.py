"""Matrix products of e4m3 rows with e4m3 weights, a scale for 128 neighbours of a row and for 128 x 128 of a weight.

128 neighbours are multiplied in the matrix units, and what comes of them is scaled before it is summed in float32.
Few rows take the kernel that streams the weight (`linear_fp8`). More go to torch's scaled product, the vendor's
library, where that has one of such scales, and else to a kernel of tiles here.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_core.api import Problem
from tokenspeed_kernels.triton import precompile
from tokenspeed_kernels.triton.linear.gemm_fp8 import MAX_ROWS, FewRows, Tiling
from tokenspeed_kernels.triton.quantize.fp8_per_group import GROUP

FEW_ROWS = 32  # of x, up to which more tiles of the weight are in flight
MIDDLE_ROWS = 128  # of x, up to which tiles are narrow
TOGETHER = 8  # tiles of x that go one after another for a tile of the weight
LIBRARY_GROUPS = 4  # groups of a weight's row are a multiple of these for the vendor's library
LIBRARY_ROWS = 4  # and so are the rows of x

LinearFp8Block = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True, slots=True)
class ManyTiling:
    """Rows of x and rows of the weight in a tile, warps of a program, tiles in flight."""

    block_m: int
    block_n: int  # a divisor of GROUP, so that a tile of the weight has one scale for each group of features
    num_warps: int
    num_stages: int


MIDDLE, MANY = ManyTiling(64, 64, 4, 4), ManyTiling(64, 128, 4, 4)


@precompile.jit(do_not_specialize=["num_rows"])
def _multiply(
    x_ptr,
    x_scale_ptr,
    w_ptr,
    w_scale_ptr,
    b_ptr,
    y_ptr,
    x_stride,
    x_scale_stride,
    num_rows,
    N,
    K: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TOGETHER: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Store y [T, N]: a program for each tile. Those of TOGETHER tiles of T follow one another for a tile of N,
    so that the second-level cache still holds what they read.
    """
    row_tiles, column_tiles = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(N, BLOCK_N)
    band = tl.program_id(0) // (TOGETHER * column_tiles)
    height = tl.minimum(row_tiles - band * TOGETHER, TOGETHER)
    within_band = tl.program_id(0) % (TOGETHER * column_tiles)
    row_tile, column_tile = band * TOGETHER + within_band % height, within_band // height
    column = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = column < N
    real = row < num_rows
    feature = tl.arange(0, GROUP)
    w_ptrs = w_ptr + column[None, :].to(tl.int64) * K + feature[:, None]
    x_ptrs = x_ptr + row[:, None].to(tl.int64) * x_stride + feature[None, :]
    x_scale_ptrs = x_scale_ptr + row.to(tl.int64) * x_scale_stride
    w_scale_ptrs = w_scale_ptr + column_tile * BLOCK_N // GROUP * NUM_GROUPS
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for group in range(NUM_GROUPS):
        start = group * GROUP
        if K % GROUP == 0:
            w = tl.load(w_ptrs + start, mask=inside[None, :], other=0.0)
            x = tl.load(x_ptrs + start, mask=real[:, None], other=0.0)
        else:
            within = start + feature < K
            w = tl.load(w_ptrs + start, mask=inside[None, :] & within[:, None], other=0.0)
            x = tl.load(x_ptrs + start, mask=real[:, None] & within[None, :], other=0.0)
        scale = tl.load(x_scale_ptrs + group, mask=real, other=0.0) * tl.load(w_scale_ptrs + group)
        total += tl.dot(x, w) * scale[:, None]
    if HAS_BIAS:
        total += tl.load(b_ptr + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    y_ptrs = y_ptr + row[:, None].to(tl.int64) * N + column[None, :]
    tl.store(y_ptrs, total.to(y_ptr.dtype.element_ty), mask=real[:, None] & inside[None, :])


def few_tiling(out_size: int, in_size: int, num_rows: int) -> Tiling:
    """Return the tiling for few rows: where these are few programs, features are split over more."""
    if out_size >= 16384:
        return Tiling(64, GROUP, 4, 6 if num_rows <= FEW_ROWS else 4)
    if out_size >= 6144:
        return Tiling(64, GROUP, 4, 6, 2)
    return Tiling(64, GROUP, 4, 6, 4 if num_rows > FEW_ROWS else 3 if in_size < 8192 else 6)


def multiply_tiles(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    tiling: ManyTiling,
) -> Tensor:
    """Return y [T, O] by the kernel of tiles; rows of x and its scales may be strided."""
    num_rows, (out_size, in_size) = x.shape[0], weight.shape
    y = x.new_empty((num_rows, out_size), dtype=dtype)
    _multiply[(triton.cdiv(num_rows, tiling.block_m) * triton.cdiv(out_size, tiling.block_n),)](
        x,
        x_scale,
        weight,
        weight_scale,
        bias,
        y,
        x.stride(0),
        x_scale.stride(0),
        num_rows,
        out_size,
        K=in_size,
        NUM_GROUPS=triton.cdiv(in_size, GROUP),
        HAS_BIAS=bias is not None,
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        TOGETHER=TOGETHER,
        GROUP=GROUP,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    return y


def library_takes(problem: Problem) -> bool:
    """Say whether torch's scaled product has these scales: cuBLAS from CUDA 12.9 on, on Hopper, in whole blocks.

    It was held to the definition for results in bfloat16, and for no others.
    """
    return (
        torch.cuda.is_available()
        and torch.cuda.get_device_capability() == (9, 0)
        and tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2]) >= (12, 9)
        and problem["dtype"] == "bfloat16"
        and problem["out_size"] % GROUP == 0
        and problem["in_size"] % (GROUP * LIBRARY_GROUPS) == 0
    )


class Product:
    """The product for one shape of the weight, whatever the rows."""

    def __init__(self, problem: Problem) -> None:
        self._out_size, self._in_size = out_size, in_size = problem["out_size"], problem["in_size"]
        self._dtype: torch.dtype = getattr(torch, problem["dtype"])
        self._few, self._more = (
            FewRows(out_size, in_size, self._dtype, few_tiling(out_size, in_size, num_rows), GROUP)
            for num_rows in (FEW_ROWS, MAX_ROWS)
        )
        self._has_library = library_takes(problem)

    def __call__(
        self, x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None
    ) -> Tensor:
        """Return y [T, O]; rows of x and its scales may be strided. Calls follow one another on one stream."""
        num_rows = x.shape[0]
        if num_rows > MIDDLE_ROWS and self._has_library:
            return self.by_library(x, x_scale, weight, weight_scale, bias)
        if num_rows > MAX_ROWS:
            tiling = MIDDLE if num_rows <= MIDDLE_ROWS else MANY
            return multiply_tiles(x, x_scale, weight, weight_scale, bias, self._dtype, tiling)
        if num_rows == 0:
            return x.new_empty((0, self._out_size), dtype=self._dtype)
        few = self._few if num_rows <= FEW_ROWS else self._more
        return few(x, x_scale, weight, weight_scale, bias)

    def by_library(
        self, x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None
    ) -> Tensor:
        """Return y by torch's scaled product, and the rows by which T is no multiple of four by the kernel for few."""
        num_rows = x.shape[0]
        whole = num_rows - num_rows % LIBRARY_ROWS
        y = x.new_empty((num_rows, self._out_size), dtype=self._dtype)
        torch._scaled_mm(
            x[:whole].contiguous(),
            weight.t(),
            scale_b=weight_scale.t(),
            out_dtype=self._dtype,
            out=y[:whole],
            scale_a=x_scale[:whole]
            .t()
            .contiguous()
            .t(),  # the library wants a group's scales side by side
        )
        if bias is not None:
            y[:whole].add_(bias)
        if whole < num_rows:
            y[whole:] = self._few(x[whole:], x_scale[whole:], weight, weight_scale, bias)
        return y

    def compile(self) -> None:
        """Have the kernels compiled that calls will launch."""
        weight = precompile.blank("float8_e4m3fn", self._out_size, self._in_size)
        weight_scale, blank = (
            _blank_scales(triton.cdiv(self._out_size, GROUP), self._in_size),
            deepcopy(self),
        )
        for num_rows in (
            16,
            FEW_ROWS,
            MAX_ROWS,
            MIDDLE_ROWS,
            *(() if self._has_library else (MIDDLE_ROWS + 1,)),
        ):
            x = precompile.blank("float8_e4m3fn", num_rows, self._in_size)
            precompile.compile_for(
                blank, x, _blank_scales(num_rows, self._in_size), weight, weight_scale, None
            )


def linear_fp8_block(problem: Problem) -> LinearFp8Block:
    """Return `linear(x, x_scale, weight, weight_scale, bias) -> y [T, O]`; rows of x and its scales may be strided."""
    product = Product(problem)
    product.compile()
    return product


def _blank_scales(num_rows: int, in_size: int) -> Tensor:
    return precompile.blank("float32", num_rows, triton.cdiv(in_size, GROUP))
