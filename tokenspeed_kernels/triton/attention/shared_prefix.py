"""The search for a prefix that many rows share: the op `find_shared_prefix`, and its kernel for attention backends.

It compares the rows of the block table, int32 [S, M]; equal leading entries are shared blocks.
"""

from __future__ import annotations

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_core.api import Problem
from tokenspeed_kernels.options import SharedPrefixOptions
from tokenspeed_kernels.reference.cache import (
    DEPTH_FACTOR,
    MAX_CANDIDATES,
    MIN_SHARED_READS,
    MIN_SHARED_TOKENS,
    MIN_SHARING_ROWS,
)
from tokenspeed_kernels.triton import precompile

ROWS, COLUMNS = 8, 256  # block-table entries that a program compares at once
MANY_ROWS = 256
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
        shared = seq_lens.new_empty(2 + seq_lens.shape[0])
        fill_found(seq_lens, block_table, shared, block_size, block_size, MIN_SHARED_READS)
        return shared

    if not options.shared_prefix:
        return lambda block_table, seq_lens: None
    for width in (64, 65):  # strides that are a multiple of 16, and others
        precompile.compile_for(
            fill_found,
            precompile.blank("int32", MIN_SHARING_ROWS),
            precompile.blank("int32", MIN_SHARING_ROWS, width),
            precompile.blank("int32", 2 + MIN_SHARING_ROWS),
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
    """Store what rows share in `found` int32 [2 + S or more], like the op, with multiples of `multiple_of` tokens.

    All values are 0 if shared tokens times rows would be less than `min_reads`.
    """
    num_rows = seq_lens.shape[0]
    candidates = {"STEP": -(-num_rows // MAX_CANDIDATES), "CANDIDATES": MAX_CANDIDATES}
    count_shared[(triton.cdiv(num_rows, ROWS),)](
        seq_lens,
        block_table,
        found,
        num_rows,
        block_table.stride(0),
        MIN_ROWS=MIN_SHARING_ROWS,
        MIN_KEYS=MIN_SHARED_TOKENS,
        DEPTH_FACTOR=DEPTH_FACTOR,
        BLOCK_SIZE=block_size,
        BLOCK_N=multiple_of,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        MANY_ROWS=MANY_ROWS,
        **candidates,
        num_warps=8,
    )
    choose_group[(1,)](
        found,
        num_rows,
        MIN_ROWS=MIN_SHARING_ROWS,
        MIN_KEYS=MIN_SHARED_TOKENS,
        MIN_READS=min_reads,
        MANY_ROWS=MANY_ROWS,
        **candidates,
        num_warps=8,
    )


@triton.jit
def _load_blocks(
    seq_lens_ptr, table_ptr, table_stride, row, num_rows, num_blocks, BLOCK_SIZE: tl.constexpr
):
    """Return block `num_blocks - 1` of some rows; for rows that are not longer, a negative number that no other row has."""
    seq_len = tl.load(seq_lens_ptr + row, mask=row < num_rows, other=0)
    is_longer = seq_len > num_blocks * BLOCK_SIZE
    cell = table_ptr + row.to(tl.int64) * table_stride + num_blocks - 1
    return tl.where(is_longer, tl.load(cell, mask=is_longer, other=0), -1 - row)


@precompile.jit(
    do_not_specialize=["num_rows", "STEP"],
    do_not_specialize_on_alignment=["seq_lens_ptr", "table_ptr", "found_ptr"],
)
def count_shared(
    seq_lens_ptr,
    table_ptr,
    found_ptr,
    num_rows,
    table_stride,
    STEP,
    MIN_ROWS: tl.constexpr,
    MIN_KEYS: tl.constexpr,
    DEPTH_FACTOR: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    MANY_ROWS: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """Choose a leading row, and store how many keys each row shares with it. Grid (tiles of rows).

    Rows with the same block at a depth form a group. The leading row is from the group with the most rows times depth,
    at a few depths. All programs choose the same row. A row's last key does not count as shared. The numbers of keys
    are multiples of BLOCK_N.
    """
    candidate = tl.arange(0, CANDIDATES) * STEP
    many = tl.arange(0, MANY_ROWS)
    longest = tl.zeros([], dtype=tl.int32)
    for first_row in range(0, num_rows, MANY_ROWS):
        row = first_row + many
        seq_len = tl.load(seq_lens_ptr + row, mask=row < num_rows, other=0)
        longest = tl.maximum(longest, tl.max(seq_len, axis=0))
    best = tl.zeros([], dtype=tl.int32)
    lead = tl.zeros([], dtype=tl.int32)
    depth = tl.zeros([], dtype=tl.int32) + MIN_KEYS
    while depth < longest:
        num_blocks = tl.cdiv(depth, BLOCK_SIZE)
        block = _load_blocks(
            seq_lens_ptr, table_ptr, table_stride, candidate, num_rows, num_blocks, BLOCK_SIZE
        )
        count = tl.zeros([CANDIDATES], dtype=tl.int32)
        for first_row in range(0, num_rows, MANY_ROWS):
            other = _load_blocks(
                seq_lens_ptr,
                table_ptr,
                table_stride,
                first_row + many,
                num_rows,
                num_blocks,
                BLOCK_SIZE,
            )
            count += tl.sum((block[:, None] == other[None, :]).to(tl.int32), axis=1)
        most = tl.max(count, axis=0)
        first = tl.min(tl.where(count == most, candidate, NOWHERE), axis=0)
        lead = tl.where((most >= MIN_ROWS) & (most * depth > best), first, lead)
        best = tl.where(most >= MIN_ROWS, tl.maximum(most * depth, best), best)
        depth = tl.where(most >= MIN_ROWS, depth * DEPTH_FACTOR, longest)

    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    seq_len = tl.load(seq_lens_ptr + row, mask=row < num_rows, other=0)
    num_columns = tl.maximum(seq_len - 1, 0) // BLOCK_SIZE
    agreed = tl.zeros([ROWS], dtype=tl.int32)
    start = tl.zeros([], dtype=tl.int32)
    last = tl.where(best > 0, tl.max(num_columns, axis=0), 0)
    while start < last:
        column = start + tl.arange(0, COLUMNS)
        expected = tl.load(
            table_ptr + lead.to(tl.int64) * table_stride + column, mask=column < last, other=0
        )
        cell = table_ptr + row.to(tl.int64)[:, None] * table_stride + column[None, :]
        is_inside = column[None, :] < num_columns[:, None]
        block = tl.load(cell, mask=is_inside, other=0)
        differs = (block != expected[None, :]) | (is_inside == 0)
        end = tl.min(tl.where(differs, column[None, :], start + COLUMNS), axis=1)
        agreed = tl.where(agreed == start, end, agreed)
        goes_on = tl.max((agreed == start + COLUMNS).to(tl.int32), axis=0) > 0
        start = tl.where(goes_on, start + COLUMNS, last)
    tl.store(found_ptr + 1, lead)
    tl.store(found_ptr + 2 + row, agreed * BLOCK_SIZE // BLOCK_N * BLOCK_N, mask=row < num_rows)


@precompile.jit(
    do_not_specialize=["num_rows", "STEP"], do_not_specialize_on_alignment=["found_ptr"]
)
def choose_group(
    found_ptr,
    num_rows,
    STEP,
    MIN_ROWS: tl.constexpr,
    MIN_KEYS: tl.constexpr,
    MIN_READS: tl.constexpr,
    MANY_ROWS: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """Choose the length of the shared prefix, of the numbers in `found`, that saves most reads. One program.

    Replaces the number of each row by this length, or by 0 if the row shares fewer keys.
    """
    many = tl.arange(0, MANY_ROWS)
    candidate = tl.arange(0, CANDIDATES) * STEP
    num_keys = tl.load(found_ptr + 2 + candidate, mask=candidate < num_rows, other=0)
    count = tl.zeros([CANDIDATES], dtype=tl.int32)
    for first_row in range(0, num_rows, MANY_ROWS):
        row = first_row + many
        other = tl.load(found_ptr + 2 + row, mask=row < num_rows, other=0)
        count += tl.sum((other[None, :] >= num_keys[:, None]).to(tl.int32), axis=1)
    reads = count * num_keys
    pays = (count >= MIN_ROWS) & (num_keys >= MIN_KEYS) & (reads >= MIN_READS)
    reads = tl.where(pays, reads, 0)
    is_best = (reads == tl.max(reads, axis=0)) & (reads > 0)
    shared = tl.max(tl.where(is_best, num_keys, 0), axis=0)
    lead = tl.load(found_ptr + 1)
    tl.debug_barrier()  # before the numbers are overwritten
    for first_row in range(0, num_rows, MANY_ROWS):
        row = first_row + many
        other = tl.load(found_ptr + 2 + row, mask=row < num_rows, other=0)
        tl.store(found_ptr + 2 + row, tl.where(other >= shared, shared, 0), mask=row < num_rows)
    tl.store(found_ptr, shared)
    tl.store(found_ptr + 1, tl.where(shared > 0, lead, 0))
