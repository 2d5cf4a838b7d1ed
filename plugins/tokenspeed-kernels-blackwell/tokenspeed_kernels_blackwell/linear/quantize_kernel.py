# mypy: allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators, allow-untyped-defs, no-warn-return-any
"""Kernels that quantize rows x [T, N] to MXFP8 and NVFP4 in groups, with bitwise the same results as `reference`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def to_mxfp8(x_ptr, codes_ptr, scale_ptr, x_stride, GROUPS: tl.constexpr, BLOCK: tl.constexpr):
    """Quantize to e4m3 codes and scale exponents of groups of 32. Grid (T, blocks of groups)."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = group < GROUPS
    at = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    x = tl.load(x_ptr + row * x_stride + at, mask=inside[:, None], other=0.0).to(tl.float32)
    bits = tl.max(tl.abs(x), axis=1).to(tl.int32, bitcast=True)
    # 448 = 1.75 * 2^8: a mantissa above 1.75 carries into the exponent.
    scale = tl.maximum(((bits + 0x1FFFFF) >> 23) - 8, 0)
    factor = ((254 - scale) << 23).to(tl.float32, bitcast=True)  # 2^(127 - scale)
    codes = (x * factor[:, None]).to(tl.float8e4nv)
    tl.store(codes_ptr + row * (GROUPS * 32) + at, codes, mask=inside[:, None])
    tl.store(scale_ptr + row * GROUPS + group, scale.to(tl.uint8), mask=inside)


@triton.jit
def to_nvfp4(
    x_ptr, codes_ptr, scale_ptr, over_all_ptr, x_stride, GROUPS: tl.constexpr, BLOCK: tl.constexpr
):
    """Quantize to e2m1 codes, two per byte, and e4m3 scales of groups of 16. Grid (T, blocks of groups)."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = group < GROUPS
    at = group[:, None] * 16 + tl.arange(0, 16)[None, :]
    x = tl.load(x_ptr + row * x_stride + at, mask=inside[:, None], other=0.0).to(tl.float32)
    over_all = tl.full([BLOCK], 0.0, tl.float32) + tl.load(over_all_ptr)
    largest = tl.div_rn(tl.max(tl.abs(x), axis=1), tl.full([BLOCK], 6.0, tl.float32))
    scale = tl.minimum(tl.div_rn(largest, over_all), 448.0).to(tl.float8e4nv)
    divisor = (scale.to(tl.float32) * over_all)[:, None] + tl.zeros([BLOCK, 16], tl.float32)
    scaled = tl.where(divisor == 0.0, 0.0, tl.div_rn(x, divisor))
    size = tl.abs(scaled)
    # Ties round to the even code.
    code = (size > 0.25).to(tl.int32) + (size >= 0.75) + (size > 1.25) + (size >= 1.75)
    code += (size > 2.5).to(tl.int32) + (size >= 3.5) + (size > 5.0)
    code |= (scaled < 0.0).to(tl.int32) << 3
    low, high = tl.split(tl.reshape(code, [BLOCK, 8, 2]))
    half = group[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(
        codes_ptr + row * (GROUPS * 8) + half, (low | high << 4).to(tl.uint8), mask=inside[:, None]
    )
    tl.store(scale_ptr + row * GROUPS + group, scale, mask=inside)
