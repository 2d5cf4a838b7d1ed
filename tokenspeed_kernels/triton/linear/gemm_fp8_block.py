"""FP8 (e4m3) linear layers with block-wise scales, 1 x 128 for activations, 128 x 128 for weights (arXiv:2412.19437).

x is [T, I] and the weight [O, I]. The tensor cores multiply 128 features at a time; each partial result is scaled
before it is added in float32. Few rows go to the streaming kernel of `gemm_fp8`. More rows go to torch._scaled_mm
(cuBLAS) where it supports these scales, otherwise to a tiled GEMM here.
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

FEW_ROWS = 32  # up to this many rows, the streaming kernel keeps more weight tiles in flight
MIDDLE_ROWS = 128  # up to this many rows, the tiled GEMM uses narrow tiles
TOGETHER = 8  # consecutive tiles of x per tile of the weight
LIBRARY_GROUPS = 4  # cuBLAS needs the groups in a weight row to be a multiple of this
LIBRARY_ROWS = 4  # and the rows of x

LinearFp8Block = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True, slots=True)
class ManyTiling:
    """Rows of x and rows of the weight per tile, warps, pipeline stages.

    `block_n` divides GROUP, so that a weight tile has one scale per group of features.
    """

    block_m: int
    block_n: int
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
    """Compute y [T, N], one program per tile.

    Programs for TOGETHER consecutive tiles of T are neighbors, so that they share a weight tile in the L2 cache.
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
    """Return the tiling for few rows. Small weights make few tiles, so their features are split over programs."""
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
    """Return y [T, O], computed by the tiled GEMM. Rows of x and its scales may be strided."""
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
    """Return whether torch._scaled_mm supports these scales: cuBLAS of CUDA 12.9 on Hopper, in whole blocks.

    Only bfloat16 output has been tested against the reference.
    """
    return (
        torch.cuda.is_available()
        and torch.cuda.get_device_capability() == (9, 0)
        and tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2]) >= (12, 9)
        and problem["dtype"] == "bfloat16"
        and problem["out_size"] % GROUP == 0
        and problem["in_size"] % (GROUP * LIBRARY_GROUPS) == 0
    )


class LinearFp8BlockKernel:
    """The linear layer for one weight shape and any number of rows."""

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
        """Return y [T, O]. Rows of x and its scales may be strided. Calls must be ordered on one stream."""
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
        """Return y computed by torch._scaled_mm; up to three remaining rows go to the streaming kernel."""
        num_rows = x.shape[0]
        whole = num_rows - num_rows % LIBRARY_ROWS
        y = x.new_empty((num_rows, self._out_size), dtype=self._dtype)
        # cuBLAS wants the scales of one group in consecutive memory.
        by_group = x_scale[:whole].t().contiguous()
        torch._scaled_mm(
            x[:whole].contiguous(),
            weight.t(),
            scale_a=by_group.t(),
            scale_b=weight_scale.t(),
            out_dtype=self._dtype,
            out=y[:whole],
        )
        if bias is not None:
            y[:whole].add_(bias)
        if whole < num_rows:
            y[whole:] = self._few(x[whole:], x_scale[whole:], weight, weight_scale, bias)
        return y

    def compile(self) -> None:
        """Precompile the kernels that calls can launch."""
        weight = precompile.blank("float8_e4m3fn", self._out_size, self._in_size)
        weight_scale = _blank_scales(triton.cdiv(self._out_size, GROUP), self._in_size)
        blank = deepcopy(self)
        sizes = [16, FEW_ROWS, MAX_ROWS, MIDDLE_ROWS]
        if not self._has_library:
            sizes.append(MIDDLE_ROWS + 1)
        for num_rows in sizes:
            x = precompile.blank("float8_e4m3fn", num_rows, self._in_size)
            precompile.compile_for(
                blank, x, _blank_scales(num_rows, self._in_size), weight, weight_scale, None
            )


def linear_fp8_block(problem: Problem) -> LinearFp8Block:
    """Return `linear(x, x_scale, weight, weight_scale, bias) -> y [T, O]`; see the op's contract for shapes."""
    kernel = LinearFp8BlockKernel(problem)
    kernel.compile()
    return kernel


def _blank_scales(num_rows: int, in_size: int) -> Tensor:
    return precompile.blank("float32", num_rows, triton.cdiv(in_size, GROUP))
