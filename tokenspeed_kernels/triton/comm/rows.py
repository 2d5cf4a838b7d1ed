"""A row in a kernel of a collective: how it is divided between threads, and how it is stored."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenspeed_kernels.triton.quantize.fp8_per_group import quantize_groups
from tokenspeed_kernels.triton.quantize.fp8_per_token import quantize_row


@triton.jit
def store_row(
    y,
    y_ptr,
    scale_ptr,
    row,
    num_rows,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    VECTOR: tl.constexpr,
    NUM_SCALES: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Store a float32 row y, padded with zeros. A row beyond the last one is not stored.

    NUM_SCALES: 0 stores y in the dtype of `y_ptr`. 1 quantizes it with one scale, and more with one scale per group.
    VECTOR: values that a thread loads at once. Codes are stored in the same layout, so that the order of the sum of
    squares does not depend on NUM_SCALES, and all variants give equal bits.
    """
    end = tl.where(row < num_rows, N, 0)
    column = tl.arange(0, BLOCK_N)
    if NUM_SCALES == 0:
        tl.store(y_ptr + row * N + column, y.to(y_ptr.dtype.element_ty), mask=column < end)
    elif NUM_SCALES == 1:
        codes, scale = quantize_row(y)
        target = tl.multiple_of(y_ptr + row * N + column, VECTOR)
        tl.store(target, codes, mask=column < end)
        tl.store(scale_ptr + row, scale, mask=row < num_rows)
    else:
        group = tl.arange(0, BLOCK_N // GROUP)
        column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        codes, scale = quantize_groups(tl.reshape(y, (BLOCK_N // GROUP, GROUP)))
        target = tl.multiple_of(y_ptr + row * N + column, (1, VECTOR))
        tl.store(target, codes, mask=column < end)
        tl.store(scale_ptr + row * NUM_SCALES + group, scale, mask=group * GROUP < end)


def tiling(size: int) -> tuple[int, int]:
    """Return the values and warps of a program for rows of `size` values. No value is held by two threads."""
    block = max(128, triton.next_power_of_2(size))
    return block, min(16, max(4, block // 512))
