# mypy: allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators, allow-untyped-defs, no-warn-return-any
"""The Triton kernel of `gather`: copies rows of paged caches [B, block_size, K, D] to contiguous [tokens, K, D]."""

from __future__ import annotations

import triton
import triton.language as tl


# seq_lens and the block table may be views of a step's later rows, so their alignment varies.
@triton.jit(do_not_specialize_on_alignment=["seq_lens_ptr", "table_ptr"])
def copy_rows(
    k_ptr,
    v_ptr,
    keys_ptr,
    values_ptr,
    starts_ptr,
    seq_lens_ptr,
    table_ptr,
    block_stride,
    table_stride,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    PADDING: tl.constexpr,
):
    """Copy TOKENS tokens of a row, SIZE elements each; zeros beyond its end. Grid (tiles of tokens, S)."""
    row, first = tl.program_id(1), tl.program_id(0) * TOKENS
    length = tl.load(seq_lens_ptr + row)
    if first < length + PADDING:
        token, column = first + tl.arange(0, TOKENS), tl.arange(0, COLUMNS)[None, :]
        block = tl.load(
            table_ptr + row * table_stride + token // BLOCK_SIZE, mask=token < length, other=0
        )
        source = block.to(tl.int64) * block_stride + token % BLOCK_SIZE * SIZE
        target = (tl.load(starts_ptr + row) + token).to(tl.int64) * SIZE
        is_read = (token < length)[:, None] & (column < SIZE)
        is_written = (token < length + PADDING)[:, None] & (column < SIZE)
        k = tl.load(k_ptr + source[:, None] + column, mask=is_read, other=0.0)
        tl.store(keys_ptr + target[:, None] + column, k, mask=is_written)
        v = tl.load(v_ptr + source[:, None] + column, mask=is_read, other=0.0)
        tl.store(values_ptr + target[:, None] + column, v, mask=is_written)
