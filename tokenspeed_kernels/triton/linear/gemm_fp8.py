"""FP8 (e4m3) linear layers with per-token activation scales and per-channel weight scales: the op `linear_fp8`.

x is [T, I] and the weight [O, I], both row-major with I contiguous. With few rows, as in a decode step, the GEMM is
bound by reading the weight once: programs stream it through shared memory into the tensor cores, with the few tokens as
the narrow side of the tile. More rows go to torch._scaled_mm (cuBLAS). The kernel for few rows also serves block-wise
scales (`gemm_fp8_block`).
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_core.api import Problem
from tokenspeed_kernels.triton import precompile
from tokenspeed_kernels.triton.pdl import fetch, supports_pdl

MAX_ROWS = 64  # most rows of x for the streaming kernel
MAX_INEXACT = 128  # products summed in the tensor cores' short accumulator before a float32 sum
PREFETCHED_TILES = 8  # tiles of the weight prefetched to L2 before x is available

LinearFp8 = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True, slots=True)
class Tiling:
    """Weight rows and features per tile, warps, pipeline stages, and programs that split the features (split-K)."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    num_splits: int = 1


@precompile.jit(do_not_specialize=["num_rows"])
def _few_rows(
    x_ptr,
    x_scale_ptr,
    w_ptr,
    w_scale_ptr,
    b_ptr,
    y_ptr,
    partial_ptr,
    count_ptr,
    x_stride,
    x_scale_stride,
    num_rows,
    N,
    K: tl.constexpr,
    SHARE: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MAX_INEXACT: tl.constexpr,
    PREFETCHED: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Compute y [T, N] for T <= BLOCK_M. Grid (tiles of N, splits of K).

    GROUP: side of the blocks that share a weight scale, and number of features that share an activation scale; a
    multiple of both sides of the weight tile. 0: per-channel and per-token scales.
    With SPLITS > 1 each split writes its float32 sums to `partial`. The last split to arrive adds them, always in the
    same order, and resets the tile's count for the next launch.
    PREFETCHED: tiles of the weight, which no kernel writes, prefetched to L2 while the previous kernel is still
    running (see `pdl`). 0: launched without PDL.
    """
    tile, split = tl.program_id(0), tl.program_id(1)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < N
    row = tl.arange(0, BLOCK_M)
    real = row < num_rows
    if PREFETCHED > 0:
        tl.extra.cuda.gdc_launch_dependents()
        first = tl.minimum(split * SHARE + tl.arange(0, PREFETCHED) * BLOCK_K, K - 1)
        line = w_ptr + tl.minimum(column, N - 1)[:, None].to(tl.int64) * K + first[None, :]
        fetch(line)
        tl.extra.cuda.gdc_wait()
    feature = tl.arange(0, BLOCK_K)
    w_ptrs = w_ptr + column[:, None].to(tl.int64) * K + feature[None, :]
    x_ptrs = x_ptr + row[None, :] * x_stride + feature[:, None]
    x_scale_ptrs = x_scale_ptr + row * x_scale_stride
    if GROUP > 0:
        block_ptr = w_scale_ptr + tile * BLOCK_N // GROUP * tl.cdiv(K, GROUP)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in range(split * SHARE, tl.minimum(split * SHARE + SHARE, K), BLOCK_K):
        if K % BLOCK_K == 0:
            w = tl.load(
                w_ptrs + start, mask=inside[:, None], other=0.0, eviction_policy="evict_first"
            )
            x = tl.load(x_ptrs + start, mask=real[None, :], other=0.0)
        else:
            within = start + feature < K
            w = tl.load(w_ptrs + start, mask=inside[:, None] & within[None, :], other=0.0)
            x = tl.load(x_ptrs + start, mask=real[None, :] & within[:, None], other=0.0)
        if GROUP > 0:
            group = start // GROUP
            scale = tl.load(x_scale_ptrs + group, mask=real, other=0.0) * tl.load(block_ptr + group)
            total += tl.dot(w, x) * scale[None, :]
        else:
            total = tl.dot(w, x, total, max_num_imprecise_acc=MAX_INEXACT)
    is_last = True
    if SPLITS > 1:
        partial_ptrs = partial_ptr + row[None, :] * N + column[:, None]
        mask = real[None, :] & inside[:, None]
        tl.store(partial_ptrs + split * num_rows * N, total, mask=mask)
        tl.debug_barrier()  # all stores of the program come before its count
        is_last = tl.atomic_add(count_ptr + tile, 1, sem="acq_rel") == SPLITS - 1
        if is_last:
            total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for other in range(SPLITS):
                total += tl.load(
                    partial_ptrs + other * num_rows * N, mask=mask, other=0.0, cache_modifier=".cg"
                )
            tl.store(count_ptr + tile, 0)
    if is_last:
        if GROUP == 0:
            total *= tl.load(w_scale_ptr + column, mask=inside, other=0.0)[:, None]
            total *= tl.load(x_scale_ptrs, mask=real, other=0.0)[None, :]
        if HAS_BIAS:
            total += tl.load(b_ptr + column, mask=inside, other=0.0).to(tl.float32)[:, None]
        y_ptrs = y_ptr + row[None, :] * N + column[:, None]
        tl.store(y_ptrs, total.to(y_ptr.dtype.element_ty), mask=real[None, :] & inside[:, None])


def tiling_of(out_size: int, in_size: int) -> Tiling:
    """Return the tiling for few rows. Small weights make few tiles, so their features are split over programs."""
    length = max(32, triton.next_power_of_2(in_size))
    if 6144 <= out_size < 16384:
        return Tiling(64, min(128, length), 4, 8)
    return Tiling(64, min(256, length), 4, 4, 1 if out_size >= 16384 or in_size < 2048 else 4)


class FewRows:
    """The streaming GEMM for few rows and one weight shape, with the counters that its splits share.

    `group`: side of the blocks that share a weight scale (128 for block-wise scales), or 0 for per-channel scales.
    """

    def __init__(
        self, out_size: int, in_size: int, dtype: torch.dtype, tiling: Tiling, group: int = 0
    ) -> None:
        self._shape = (out_size, in_size)
        self._dtype = dtype
        self._tiling = tiling
        self._group = group
        self._grid = (triton.cdiv(out_size, tiling.block_n), tiling.num_splits)
        self._share = (
            triton.cdiv(triton.cdiv(in_size, tiling.block_k), tiling.num_splits) * tiling.block_k
        )
        self._counts: Tensor | None = None
        self._pdl = supports_pdl()

    def __call__(
        self, x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None
    ) -> Tensor:
        """Return y [T, O]. Rows of x and its scales may be strided; the weight is contiguous.

        Calls share counters, so they must be ordered on one stream.
        """
        num_rows, (out_size, in_size), tiling = x.shape[0], self._shape, self._tiling
        y = torch.empty((num_rows, out_size), dtype=self._dtype, device=x.device)
        partial = None
        if tiling.num_splits > 1:
            partial = torch.empty(
                (tiling.num_splits, num_rows, out_size), dtype=torch.float32, device=x.device
            )
            if self._counts is None:
                self._counts = torch.zeros(self._grid[0], dtype=torch.int32, device=x.device)
        _few_rows[self._grid](
            x,
            x_scale,
            weight,
            weight_scale,
            bias,
            y,
            partial,
            self._counts,
            x.stride(0),
            x_scale.stride(0),
            num_rows,
            out_size,
            K=in_size,
            SHARE=self._share,
            SPLITS=tiling.num_splits,
            HAS_BIAS=bias is not None,
            BLOCK_M=max(16, triton.next_power_of_2(num_rows)),
            BLOCK_N=tiling.block_n,
            BLOCK_K=tiling.block_k,
            MAX_INEXACT=min(MAX_INEXACT, tiling.block_k),
            PREFETCHED=PREFETCHED_TILES if self._pdl else 0,
            GROUP=self._group,
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
            launch_pdl=self._pdl,
        )
        return y


def linear_fp8(problem: Problem) -> LinearFp8:
    """Return `linear(x, x_scale, weight, weight_scale, bias) -> y [T, O]`; see the op's contract for shapes."""
    dtype: torch.dtype = getattr(torch, problem["dtype"])
    out_size, in_size = problem["out_size"], problem["in_size"]
    few = FewRows(out_size, in_size, dtype, tiling_of(out_size, in_size))

    def linear(
        x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None
    ) -> Tensor:
        if 0 < x.shape[0] <= MAX_ROWS:
            return few(x, x_scale, weight, weight_scale, bias)
        if x.shape[0] == 0:
            return torch.empty((0, out_size), dtype=dtype, device=x.device)
        return torch._scaled_mm(
            x.contiguous(),
            weight.t(),
            scale_a=x_scale,
            scale_b=weight_scale.t(),
            bias=bias,
            out_dtype=dtype,
            use_fast_accum=True,
        )

    for num_rows in (16, 32, MAX_ROWS):
        precompile.compile_for(
            copy(few), *blank_fp8(num_rows, in_size), *blank_fp8(out_size, in_size), None
        )
    return linear


def blank_fp8(num_rows: int, size: int) -> tuple[Tensor, Tensor]:
    """Return blank e4m3 rows and their scales."""
    return precompile.blank("float8_e4m3fn", num_rows, size), precompile.blank(
        "float32", num_rows, 1
    )
