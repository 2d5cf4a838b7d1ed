"""Linear layers with 4-bit weights and 16-bit activations: integers (W4A16), or E2M1 floats (MXFP4).

Up to MAX_ROWS rows, one kernel streams the packed weight through shared memory, converts it in registers and multiplies
it on the tensor cores, so that it reads a quarter of the bytes of a 16-bit weight. More rows are bound by the tensor
cores: the weight is converted once, and cuBLAS multiplies. The layout of packed weights [O, I / 2] is that of
`reference.w4a16`.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from tokenspeed_core.api import Problem
from tokenspeed_kernels.reference.w4a16 import MX_GROUP, LinearMxfp4
from tokenspeed_kernels.triton import precompile
from tokenspeed_kernels.triton.pdl import fetch, supports_pdl

MAX_ROWS = 256  # most rows of x for the kernel that reads the packed weight
FEW_ROWS = 64  # most rows of x in one tile
MAX_BLOCK_K = 128
MIDDLE = 8  # the zero point of symmetric weights
RUN = tl.constexpr(16)  # columns in the low bits of adjacent bytes
# A float that gets the value BIAS + i if an integer i below 16 replaces its low bits: 2^7 in bfloat16, 2^10 in float16.
BIAS = {"bfloat16": 128, "float16": 1024}
PREFETCHED_TILES = 8  # tiles of the weight prefetched to L2 before x is available

LinearW4A16 = Callable[
    [Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None], Tensor
]


@dataclass(frozen=True, slots=True)
class Tiling:
    """Weight rows per tile, warps, pipeline stages, and programs that split the features (split-K)."""

    block_n: int
    num_warps: int
    num_stages: int
    num_splits: int = 1


@triton.jit
def halves(packed, offset, BIAS: tl.constexpr, HAS_ASM: tl.constexpr):
    """Return the low and the high 4 bits of bytes as floats of the dtype of `offset`, minus (offset - BIAS).

    The instructions put each code below the exponent of BIAS, and subtract BIAS and the zero point at once, for two
    values at a time.
    """
    if not HAS_ASM:
        low = ((packed & 15).to(tl.float32) + (BIAS - offset.to(tl.float32))).to(offset.dtype)
        high = ((packed >> 4).to(tl.float32) + (BIAS - offset.to(tl.float32))).to(offset.dtype)
    elif BIAS == 128:
        low, high = tl.inline_asm_elementwise(
            asm="""
            {
            .reg .b32 low, high, one;
            and.b32 low, $4, 0x0F0F0F0F;
            shr.b32 high, $4, 4;
            and.b32 high, high, 0x0F0F0F0F;
            mov.b32 one, 0x3F803F80;
            prmt.b32 $0, low, 0x43434343, 0x4140;
            prmt.b32 $1, low, 0x43434343, 0x4342;
            prmt.b32 $2, high, 0x43434343, 0x4140;
            prmt.b32 $3, high, 0x43434343, 0x4342;
            fma.rn.bf16x2 $0, $0, one, $5;
            fma.rn.bf16x2 $1, $1, one, $6;
            fma.rn.bf16x2 $2, $2, one, $5;
            fma.rn.bf16x2 $3, $3, one, $6;
            }
            """,
            constraints="=&r,=&r,=&r,=&r,r,r,r",
            args=[packed, -offset],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        low, high = tl.inline_asm_elementwise(
            asm="""
            {
            .reg .b32 low, high;
            and.b32 low, $4, 0x0F0F0F0F;
            shr.b32 high, $4, 4;
            and.b32 high, high, 0x0F0F0F0F;
            prmt.b32 $0, low, 0x64646464, 0x4140;
            prmt.b32 $1, low, 0x64646464, 0x4342;
            prmt.b32 $2, high, 0x64646464, 0x4140;
            prmt.b32 $3, high, 0x64646464, 0x4342;
            add.rn.f16x2 $0, $0, $5;
            add.rn.f16x2 $1, $1, $6;
            add.rn.f16x2 $2, $2, $5;
            add.rn.f16x2 $3, $3, $6;
            }
            """,
            constraints="=&r,=&r,=&r,=&r,r,r,r",
            args=[packed, -offset],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    return low, high


@triton.jit
def e2m1_halves(packed, dtype: tl.constexpr, HAS_ASM: tl.constexpr):
    """Return the values of the E2M1 codes in the low and the high 4 bits of bytes.

    The instructions move sign, exponent and mantissa to their places, and multiply by the ratio of the exponents'
    biases, which also gives subnormal codes their values.
    """
    if not HAS_ASM:
        low, high = e2m1(packed & 15, dtype), e2m1(packed >> 4, dtype)
    elif dtype == tl.bfloat16:
        low, high = tl.inline_asm_elementwise(
            asm="""
            {
            .reg .b32 low, high, bits, ratio, none;
            and.b32 low, $4, 0x0F0F0F0F;
            shr.b32 high, $4, 4;
            and.b32 high, high, 0x0F0F0F0F;
            mov.b32 ratio, 0x7E807E80;
            mov.b32 none, 0x80008000;
            prmt.b32 bits, low, 0, 0x4140;
            shl.b32 $0, bits, 12; and.b32 $0, $0, 0x80008000;
            shl.b32 bits, bits, 6; and.b32 bits, bits, 0x01C001C0;
            or.b32 $0, $0, bits;
            fma.rn.bf16x2 $0, $0, ratio, none;
            prmt.b32 bits, low, 0, 0x4342;
            shl.b32 $1, bits, 12; and.b32 $1, $1, 0x80008000;
            shl.b32 bits, bits, 6; and.b32 bits, bits, 0x01C001C0;
            or.b32 $1, $1, bits;
            fma.rn.bf16x2 $1, $1, ratio, none;
            prmt.b32 bits, high, 0, 0x4140;
            shl.b32 $2, bits, 12; and.b32 $2, $2, 0x80008000;
            shl.b32 bits, bits, 6; and.b32 bits, bits, 0x01C001C0;
            or.b32 $2, $2, bits;
            fma.rn.bf16x2 $2, $2, ratio, none;
            prmt.b32 bits, high, 0, 0x4342;
            shl.b32 $3, bits, 12; and.b32 $3, $3, 0x80008000;
            shl.b32 bits, bits, 6; and.b32 bits, bits, 0x01C001C0;
            or.b32 $3, $3, bits;
            fma.rn.bf16x2 $3, $3, ratio, none;
            }
            """,
            constraints="=&r,=&r,=&r,=&r,r",
            args=[packed],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        low, high = tl.inline_asm_elementwise(
            asm="""
            {
            .reg .b32 low, high, bits, ratio;
            and.b32 low, $4, 0x0F0F0F0F;
            shr.b32 high, $4, 4;
            and.b32 high, high, 0x0F0F0F0F;
            mov.b32 ratio, 0x74007400;
            prmt.b32 bits, low, 0, 0x4140;
            shl.b32 $0, bits, 12; and.b32 $0, $0, 0x80008000;
            shl.b32 bits, bits, 9; and.b32 bits, bits, 0x0E000E00;
            or.b32 $0, $0, bits;
            mul.rn.f16x2 $0, $0, ratio;
            prmt.b32 bits, low, 0, 0x4342;
            shl.b32 $1, bits, 12; and.b32 $1, $1, 0x80008000;
            shl.b32 bits, bits, 9; and.b32 bits, bits, 0x0E000E00;
            or.b32 $1, $1, bits;
            mul.rn.f16x2 $1, $1, ratio;
            prmt.b32 bits, high, 0, 0x4140;
            shl.b32 $2, bits, 12; and.b32 $2, $2, 0x80008000;
            shl.b32 bits, bits, 9; and.b32 bits, bits, 0x0E000E00;
            or.b32 $2, $2, bits;
            mul.rn.f16x2 $2, $2, ratio;
            prmt.b32 bits, high, 0, 0x4342;
            shl.b32 $3, bits, 12; and.b32 $3, $3, 0x80008000;
            shl.b32 bits, bits, 9; and.b32 bits, bits, 0x0E000E00;
            or.b32 $3, $3, bits;
            mul.rn.f16x2 $3, $3, ratio;
            }
            """,
            constraints="=&r,=&r,=&r,=&r,r",
            args=[packed],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    return low, high


@triton.jit
def e2m1(code, dtype: tl.constexpr):
    """Return the values of E2M1 codes 0 to 15."""
    exponent, mantissa = ((code >> 1) & 3).to(tl.float32), (code & 1).to(tl.float32)
    size = tl.where(exponent == 0, 0.5 * mantissa, tl.exp2(exponent - 1.0) * (1.0 + 0.5 * mantissa))
    return tl.where(code >= 8, -size, size).to(dtype)


@triton.jit
def e8m0(code):
    """Return the powers of two, float32, of E8M0 codes, that is of exponents with a bias of 127; 0 for code 0."""
    return (code.to(tl.uint32) << 23).to(tl.float32, bitcast=True)


@precompile.jit(do_not_specialize=["num_rows"])
def _multiply(
    x_ptr,
    w_ptr,
    scale_ptr,
    zero_ptr,
    b_ptr,
    y_ptr,
    partial_ptr,
    count_ptr,
    x_stride,
    num_rows,
    N,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    SHARE: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr,
    MIDDLE: tl.constexpr,
    IS_E2M1: tl.constexpr,
    HAS_ASM: tl.constexpr,
    PREFETCHED: tl.constexpr,
):
    """Compute y [T, N]. Grid (tiles of N, splits of K, tiles of T).

    Sums of a group of columns are scaled before they are added in float32. With SPLITS > 1 each split writes its sums
    to `partial`; the last one to arrive adds them, always in the same order, and resets the tile's count. PREFETCHED:
    tiles of the weight, which no kernel writes, prefetched to L2 while the previous kernel is still running (see
    `pdl`). 0: launched without PDL.
    """
    tile, split, row_tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < N
    row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    real = row < num_rows
    HALF: tl.constexpr = BLOCK_K // 2
    w_row = w_ptr + tl.minimum(column, N - 1)[:, None].to(tl.int64) * (K // 2)
    if PREFETCHED > 0:
        tl.extra.cuda.gdc_launch_dependents()
        first = (split * SHARE + tl.arange(0, PREFETCHED) * 256) // 2
        fetch(w_row + tl.minimum(first, K // 2 - 1)[None, :])
        tl.extra.cuda.gdc_wait()
    byte = tl.arange(0, HALF)
    # The column of x for the low bits of each byte; the column for the high bits is one run further.
    feature = byte // RUN * (2 * RUN) + byte % RUN
    w_ptrs = w_row + byte[None, :]
    x_ptrs = x_ptr + row[None, :].to(tl.int64) * x_stride + feature[:, None]
    group_ptr = tl.minimum(column, N - 1).to(tl.int64) * (K // GROUP)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in range(split * SHARE, tl.minimum(split * SHARE + SHARE, K), BLOCK_K):
        packed = tl.load(w_ptrs + start // 2, eviction_policy="evict_first")
        low_x = tl.load(x_ptrs + start, mask=real[None, :], other=0.0)
        high_x = tl.load(x_ptrs + start + RUN, mask=real[None, :], other=0.0)
        group = start // GROUP
        scale = tl.load(scale_ptr + group_ptr + group)
        if IS_E2M1:
            scale = e8m0(scale)
            low, high = e2m1_halves(packed, dtype, HAS_ASM)
        else:
            scale = scale.to(tl.float32)
            if HAS_ZERO:
                offset = tl.load(zero_ptr + group_ptr + group).to(tl.float32) + BIAS
            else:
                offset = tl.full((BLOCK_N,), BIAS + MIDDLE, tl.float32)
            offsets = tl.broadcast_to(offset.to(dtype)[:, None], (BLOCK_N, HALF))
            low, high = halves(packed, offsets, BIAS, HAS_ASM)
        part = tl.dot(low, low_x)
        part = tl.dot(high, high_x, part)
        total += part * scale[:, None]
    is_last = True
    mask = real[None, :] & inside[:, None]
    at = row[None, :].to(tl.int64) * N + column[:, None]
    if SPLITS > 1:
        plane = tl.cast(num_rows, tl.int64) * N
        tl.store(partial_ptr + split * plane + at, total, mask=mask)
        tl.debug_barrier()  # all stores of the program come before its count
        counter = count_ptr + row_tile * tl.num_programs(0) + tile
        is_last = tl.atomic_add(counter, 1, sem="acq_rel") == SPLITS - 1
        if is_last:
            total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for other in range(SPLITS):
                total += tl.load(
                    partial_ptr + other * plane + at, mask=mask, other=0.0, cache_modifier=".cg"
                )
            tl.store(counter, 0)
    if is_last:
        if HAS_BIAS:
            total += tl.load(b_ptr + column, mask=inside, other=0.0).to(tl.float32)[:, None]
        tl.store(y_ptr + at, total.to(dtype), mask=mask)


@precompile.jit
def _dequantize(
    w_ptr,
    scale_ptr,
    zero_ptr,
    y_ptr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    MIDDLE: tl.constexpr,
    IS_E2M1: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the values of one weight row, one block of bytes per program. Grid (rows, blocks)."""
    row = tl.program_id(0).to(tl.int64)
    byte = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    within = byte < K // 2
    packed = tl.load(w_ptr + row * (K // 2) + byte, mask=within, other=0)
    column = byte // RUN * (2 * RUN) + byte % RUN
    at = row * (K // GROUP) + column // GROUP
    scale = tl.load(scale_ptr + at, mask=within, other=0)
    if HAS_ZERO:
        zero = tl.load(zero_ptr + at, mask=within, other=0).to(tl.float32)
    else:
        zero = tl.full((BLOCK,), MIDDLE, tl.float32)
    if IS_E2M1:
        wide = e8m0(scale)
        low, high = e2m1(packed & 15, tl.float32), e2m1(packed >> 4, tl.float32)
    else:
        wide = scale.to(tl.float32)
        low, high = (packed & 15).to(tl.float32) - zero, (packed >> 4).to(tl.float32) - zero
    y_ptrs = y_ptr + row * K + column
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    tl.store(y_ptrs, (low * wide).to(dtype), mask=within)
    tl.store(y_ptrs + RUN, (high * wide).to(dtype), mask=within)


def tiling_of(out_size: int, in_size: int, num_rows: int) -> Tiling:
    """Return the tiling for a number of rows. Small weights make few tiles, so their features are split."""
    if num_rows > FEW_ROWS:
        return Tiling(128, 8, 4)
    if out_size >= 16384:
        return Tiling(64, 4, 6)
    return Tiling(64, 4, 6, 4 if in_size >= 8192 or out_size < 6144 else 2)


class LinearW4A16Kernel:
    """The linear layer for one weight shape and any number of rows."""

    def __init__(
        self, problem: Problem, tiling: Tiling | None = None, *, is_e2m1: bool = False
    ) -> None:
        """Use `tiling` for all numbers of rows, or else the result of `tiling_of`. Codes are integers, or E2M1 floats."""
        self._dtype: torch.dtype = getattr(torch, problem["dtype"])
        self._is_e2m1 = is_e2m1
        self._out_size, self._in_size = problem["out_size"], problem["in_size"]
        self._group = problem["group_size"] or self._in_size
        self._block_k = MAX_BLOCK_K
        while self._group % self._block_k:
            self._block_k //= 2
        self._bias = BIAS[problem["dtype"]]
        self._tiling = tiling
        self._pdl = supports_pdl()
        self._has_asm = not triton.knobs.runtime.interpret
        self._counts: Tensor | None = None

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        scale: Tensor,
        zero: Tensor | None,
        order: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        """Return y [T, O]. Rows of x may be strided. Calls must be ordered on one stream."""
        if x.shape[0] == 0:
            return x.new_empty((0, self._out_size))
        if order is not None:
            x = x.index_select(1, order)
        if x.shape[0] > MAX_ROWS:
            return functional.linear(x, self.dequantize(weight, scale, zero), bias)
        return self.multiply(x, weight, scale, zero, bias)

    def multiply(
        self, x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        """Return y computed from the packed weight."""
        num_rows, out_size, in_size = x.shape[0], self._out_size, self._in_size
        tiling = self._tiling or tiling_of(out_size, in_size, num_rows)
        block_m = min(FEW_ROWS, max(16, triton.next_power_of_2(num_rows)))
        num_splits, block_k = tiling.num_splits, self._block_k
        grid = (triton.cdiv(out_size, tiling.block_n), num_splits, triton.cdiv(num_rows, block_m))
        y = x.new_empty((num_rows, out_size))
        partial, counts = None, None
        if num_splits > 1:
            partial = x.new_empty((num_splits, num_rows, out_size), dtype=torch.float32)
            if self._counts is None or self._counts.numel() < grid[0] * grid[2]:
                size = grid[0] * triton.cdiv(MAX_ROWS, 16)
                self._counts = x.new_zeros((size,), dtype=torch.int32)
            counts = self._counts
        _multiply[grid](
            x,
            weight,
            scale,
            zero,
            bias,
            y,
            partial,
            counts,
            x.stride(0),
            num_rows,
            out_size,
            K=in_size,
            GROUP=self._group,
            SHARE=triton.cdiv(in_size // block_k, num_splits) * block_k,
            SPLITS=num_splits,
            HAS_ZERO=zero is not None,
            HAS_BIAS=bias is not None,
            BLOCK_M=block_m,
            BLOCK_N=tiling.block_n,
            BLOCK_K=block_k,
            BIAS=self._bias,
            MIDDLE=MIDDLE,
            IS_E2M1=self._is_e2m1,
            HAS_ASM=self._has_asm,
            PREFETCHED=PREFETCHED_TILES if self._pdl else 0,
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
            launch_pdl=self._pdl,
        )
        return y

    def dequantize(self, weight: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        """Return the values [O, I] of a weight."""
        values = scale.new_empty((self._out_size, self._in_size), dtype=self._dtype)
        half = self._in_size // 2
        block = min(2048, triton.next_power_of_2(half))
        _dequantize[(self._out_size, triton.cdiv(half, block))](
            weight,
            scale,
            zero,
            values,
            K=self._in_size,
            GROUP=self._group,
            HAS_ZERO=zero is not None,
            MIDDLE=MIDDLE,
            IS_E2M1=self._is_e2m1,
            BLOCK=block,
            num_warps=4,
        )
        return values

    def compile(self, dtype: str, *, has_zero: bool, scale_dtype: str | None = None) -> None:
        """Precompile the kernels that calls can launch, for scales of `scale_dtype`, or else of `dtype`."""
        weight = precompile.blank("uint8", self._out_size, self._in_size // 2)
        groups = (self._out_size, self._in_size // self._group)
        scale = precompile.blank(scale_dtype or dtype, *groups)
        zero = precompile.blank("uint8", *groups) if has_zero else None
        for num_rows in (1, 32, FEW_ROWS, MAX_ROWS):
            x = precompile.blank(dtype, num_rows, self._in_size)
            precompile.compile_for(copy(self).multiply, x, weight, scale, zero, None)
        precompile.compile_for(self.dequantize, weight, scale, zero)


def linear_w4a16(problem: Problem) -> LinearW4A16:
    """Return `linear(x, weight, scale, zero, order, bias) -> y [T, O]`; see the op's contract for shapes."""
    kernel = LinearW4A16Kernel(problem)
    for has_zero in (False, True):
        kernel.compile(problem["dtype"], has_zero=has_zero)
    return kernel


def linear_mxfp4(problem: Problem) -> LinearMxfp4:
    """Return `linear(x, weight, scale, bias) -> y [T, O]`; see the op's contract for shapes."""
    kernel = LinearW4A16Kernel({**problem, "group_size": MX_GROUP}, is_e2m1=True)
    kernel.compile(problem["dtype"], has_zero=False, scale_dtype="uint8")
    return lambda x, weight, scale, bias: kernel(x, weight, scale, None, None, bias)
