"""The search for a prefix that all rows share: the op `find_shared_prefix`, and its kernel for attention backends.

It compares the rows of the block table, int32 [S, M]; equal leading entries are shared blocks.
"""

from __future__ import annotations

from collections.abc import Callable

import triton.language as tl
from torch import Tensor

from tokenspeed_core.api import Problem
from tokenspeed_kernels.options import SharedPrefixOptions
from tokenspeed_kernels.reference.cache import (
    MIN_SHARED_READS,
    MIN_SHARED_TOKENS,
    MIN_SHARING_ROWS,
)
from tokenspeed_kernels.triton import precompile

ROWS, COLUMNS = 32, 256  # block-table entries compared at once
NOWHERE = tl.constexpr(2**30)


def find_shared_prefix(
    problem: Problem, options: SharedPrefixOptions
) -> Callable[[Tensor, Tensor], Tensor | None]:
    """Return `find(block_table, seq_lens) -> shared`. Without the option `shared_prefix`, it returns None."""
    block_size: int = problem["block_size"]

    def find(block_table: Tensor, seq_lens: Tensor) -> Tensor | None:
        max_reads = block_table.numel() * block_size
        if seq_lens.shape[0] < MIN_SHARING_ROWS or max_reads < MIN_SHARED_READS:
            return None
        shared = seq_lens.new_empty(2)
        fill_found(seq_lens, block_table, shared, block_size, block_size, MIN_SHARED_READS)
        return shared

    if not options.shared_prefix:
        return lambda block_table, seq_lens: None
    for width in (64, 65):  # strides that are a multiple of 16, and others
        precompile.compile_for(
            fill_found,
            precompile.blank("int32", MIN_SHARING_ROWS),
            precompile.blank("int32", MIN_SHARING_ROWS, width),
            precompile.blank("int32", 2),
            block_size,
            block_size,
            MIN_SHARED_READS,
        )
    return find


def fill_found(
    seq_lens: Tensor,
    block_table: Tensor,
    found: Tensor,
    block_size: int,
    multiple_of: int,
    min_reads: int,
) -> None:
    """Store what the rows share in `found`, like the op, with a number of tokens that is a multiple of `multiple_of`.

    Both values are 0 if shared tokens times rows is less than `min_reads`.
    """
    find_shared[(1,)](
        seq_lens,
        block_table,
        found,
        seq_lens.shape[0],
        block_table.stride(0),
        MIN_ROWS=MIN_SHARING_ROWS,
        MIN_KEYS=MIN_SHARED_TOKENS,
        MIN_READS=min_reads,
        BLOCK_SIZE=block_size,
        BLOCK_N=multiple_of,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        num_warps=8,
    )


@precompile.jit(
    do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["seq_lens_ptr", "table_ptr"]
)
def find_shared(
    seq_lens_ptr,
    table_ptr,
    found_ptr,
    num_rows,
    table_stride,
    MIN_ROWS: tl.constexpr,
    MIN_KEYS: tl.constexpr,
    MIN_READS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Store the number of keys that all non-empty rows share, and the index of the first such row. One program.

    At least one key of each row stays unshared. The number is a multiple of BLOCK_N, at least MIN_KEYS, and at least
    MIN_READS over all rows, or else 0. Stops at the first block-table columns that differ.
    """
    member = tl.arange(0, ROWS)
    num_real = tl.zeros([], dtype=tl.int32)
    max_shared = tl.zeros([], dtype=tl.int32) + NOWHERE
    lead = tl.zeros([], dtype=tl.int32) + NOWHERE
    for first_row in range(0, num_rows, ROWS):
        row = first_row + member
        seq_len = tl.load(seq_lens_ptr + row, mask=row < num_rows, other=0)
        num_real += tl.sum((seq_len > 0).to(tl.int32), axis=0)
        max_shared = tl.minimum(
            max_shared, tl.min(tl.where(seq_len > 0, seq_len - 1, NOWHERE), axis=0)
        )
        lead = tl.minimum(lead, tl.min(tl.where(seq_len > 0, row, NOWHERE), axis=0))
    shared = tl.zeros([], dtype=tl.int32)
    min_shared = tl.maximum(tl.cdiv(MIN_READS, tl.maximum(num_real, 1)), MIN_KEYS)
    if (num_real >= MIN_ROWS) & (max_shared >= min_shared):
        num_columns = max_shared // BLOCK_SIZE
        agreed = tl.zeros([], dtype=tl.int32)
        first = tl.zeros([], dtype=tl.int32)
        while first < num_columns:
            column = first + tl.arange(0, COLUMNS)
            inside = column < num_columns
            expected = tl.load(
                table_ptr + lead.to(tl.int64) * table_stride + column, mask=inside, other=0
            )
            differs = tl.zeros([COLUMNS], dtype=tl.int32)
            for first_row in range(0, num_rows, ROWS):
                row = first_row + member
                real = tl.load(seq_lens_ptr + row, mask=row < num_rows, other=0) > 0
                cell = table_ptr + row.to(tl.int64)[:, None] * table_stride + column[None, :]
                mask = real[:, None] & inside[None, :]
                block = tl.load(cell, mask=mask, other=0)
                wrong = (block != expected[None, :]) & mask
                differs = tl.maximum(differs, tl.max(wrong.to(tl.int32), axis=0))
            end = tl.min(tl.where((differs > 0) | (column >= num_columns), column, NOWHERE), axis=0)
            agreed = tl.minimum(end, first + COLUMNS)
            first = tl.where(end < first + COLUMNS, num_columns, first + COLUMNS)
        shared = agreed * BLOCK_SIZE // BLOCK_N * BLOCK_N
        shared = tl.where(shared >= min_shared, shared, 0)
    tl.store(found_ptr, shared)
    tl.store(found_ptr + 1, tl.where(shared > 0, lead, 0))
