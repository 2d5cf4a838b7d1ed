"""The ops `advance_rows`, `map_tokens` and `note_tokens`: bookkeeping around a step.

The first two run before the forward: they update the slots' device state and fill the step's inputs. The last one
records sampled tokens after it. Each op is one small kernel. Torch would launch three to eight kernels, and each launch
adds latency to a captured step.
"""

from __future__ import annotations

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_core.api import Problem
from tokenspeed_kernels.triton import precompile
from tokenspeed_kernels.triton.pdl import supports_pdl

BLOCK = 1024  # entries that a program handles at once


# Many tensors here are views into one upload or into the slots' state, so their alignment varies.
@precompile.jit(
    do_not_specialize=["num_words", "num_rows", "num_decodes", "first", "num_slots"],
    do_not_specialize_on_alignment=[
        "words_ptr",
        "values_ptr",
        "slots_ptr",
        "advance_ptr",
        "token_ids_ptr",
        "positions_ptr",
        "ends_ptr",
    ],
)
def _advance_rows(
    state_ptr,
    words_ptr,
    values_ptr,
    slots_ptr,
    advance_ptr,
    token_ids_ptr,
    positions_ptr,
    seq_lens_ptr,
    ends_ptr,
    num_words,
    num_rows,
    num_decodes,
    first,
    num_slots,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Apply state updates, then read and advance the rows. A single program, so a barrier orders scatter and gather."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    lane = tl.arange(0, BLOCK)
    for start in range(0, num_words, BLOCK):
        at = start + lane
        word = tl.load(words_ptr + at, mask=at < num_words, other=0)
        tl.store(
            state_ptr + word,
            tl.load(values_ptr + at, mask=at < num_words, other=0),
            mask=at < num_words,
        )
    tl.debug_barrier()
    for start in range(0, num_rows, BLOCK):
        row = start + lane
        inside = row < num_rows
        token_ptr = state_ptr + first + tl.load(slots_ptr + row, mask=inside, other=0)
        length = tl.load(token_ptr + num_slots, mask=inside, other=0)
        is_decode = row < num_decodes
        tl.store(
            token_ids_ptr + row,
            tl.load(token_ptr, mask=is_decode, other=0).to(tl.int64),
            mask=is_decode,
        )
        tl.store(positions_ptr + row, length.to(tl.int64), mask=is_decode)
        end = length + tl.load(advance_ptr + row, mask=inside, other=0)
        tl.store(seq_lens_ptr + row, end, mask=inside)
        tl.store(ends_ptr + row, end.to(tl.int64), mask=inside)
        tl.store(token_ptr + num_slots, end, mask=inside)


def advance_rows(problem: Problem) -> Callable[..., None]:
    """Return `apply(state, words, values, slots, advance, token_ids, positions, seq_lens, ends, first, num_slots)`.

    See the op's contract for shapes and meaning.
    """
    del problem
    pdl = supports_pdl()

    def apply(
        state: Tensor,
        words: Tensor,
        values: Tensor,
        slots: Tensor,
        advance: Tensor,
        token_ids: Tensor,
        positions: Tensor,
        seq_lens: Tensor,
        ends: Tensor,
        first: int,
        num_slots: int,
    ) -> None:
        _advance_rows[(1,)](
            state,
            words,
            values,
            slots,
            advance,
            token_ids,
            positions,
            seq_lens,
            ends,
            len(words),
            len(slots),
            len(token_ids),
            first,
            num_slots,
            BLOCK=BLOCK,
            PDL=pdl,
            num_warps=8,
            launch_pdl=pdl,
        )

    ints, longs = precompile.blank("int32", 1), precompile.blank("int64", 1)
    precompile.compile_for(apply, ints, longs, ints, longs, ints, longs, longs, ints, longs, 0, 1)
    return apply


@precompile.jit(
    do_not_specialize=["num_rows", "num_tokens", "num_blocks"],
    do_not_specialize_on_alignment=[
        "table_ptr",
        "slots_ptr",
        "token_slots_ptr",
        "positions_ptr",
        "mapping_ptr",
    ],
)
def _map_tokens(
    table_ptr,
    slots_ptr,
    token_slots_ptr,
    positions_ptr,
    rows_ptr,
    mapping_ptr,
    num_rows,
    num_tokens,
    num_blocks,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Copy block tables (one program per row), then map tokens to KV slots (one program per BLOCK tokens)."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    if row < num_rows:
        slot = tl.load(slots_ptr + row)
        for start in range(0, num_blocks, BLOCK):
            at = start + lane
            blocks = tl.load(table_ptr + slot * num_blocks + at, mask=at < num_blocks, other=0)
            tl.store(rows_ptr + row * num_blocks + at, blocks, mask=at < num_blocks)
    else:
        token = (row - num_rows) * BLOCK + lane
        inside = token < num_tokens
        first = tl.load(token_slots_ptr + token, mask=inside, other=0) * num_blocks
        position = tl.load(positions_ptr + token, mask=inside, other=0)
        block = tl.load(table_ptr + first + position // BLOCK_SIZE, mask=inside, other=0).to(
            tl.int64
        )
        tl.store(mapping_ptr + token, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=inside)


def map_tokens(
    problem: Problem,
) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]:
    """Return `map(table [N, B], slots [R], token_slots [T], positions [T], rows [R, B], mapping [T]) -> None`."""
    block_size: int = problem["block_size"]
    pdl = supports_pdl()

    def apply(
        table: Tensor,
        slots: Tensor,
        token_slots: Tensor,
        positions: Tensor,
        rows: Tensor,
        mapping: Tensor,
    ) -> None:
        grid = len(slots) + triton.cdiv(len(positions), BLOCK)
        if grid:
            _map_tokens[(grid,)](
                table,
                slots,
                token_slots,
                positions,
                rows,
                mapping,
                len(slots),
                len(positions),
                table.shape[1],
                BLOCK_SIZE=block_size,
                BLOCK=BLOCK,
                PDL=pdl,
                launch_pdl=pdl,
            )

    ints, longs = precompile.blank("int32", 1, 1), precompile.blank("int64", 1)
    precompile.compile_for(apply, ints, longs, longs, longs, ints, longs)
    return apply


@precompile.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=["chosen_ptr", "slots_ptr", "last_token_ptr", "ids_ptr"],
)
def _note_tokens(
    logits_ptr,
    chosen_ptr,
    slots_ptr,
    last_token_ptr,
    ids_ptr,
    num_rows,
    stride,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    chosen = tl.load(chosen_ptr + row, mask=inside, other=0)
    chosen = tl.minimum(tl.maximum(chosen, 0), V - 1)
    logit = tl.load(logits_ptr + row * stride + chosen, mask=inside, other=0.0).to(tl.float32)
    narrow = chosen.to(tl.int32)
    tl.store(last_token_ptr + tl.load(slots_ptr + row, mask=inside, other=0), narrow, mask=inside)
    tl.store(ids_ptr + row, tl.where(tl.abs(logit) < float("inf"), narrow, -1), mask=inside)


def note_tokens(problem: Problem) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]:
    """Return `note(logits [S, V], chosen int64 [S], slots int64 [S], last_token int32 [N], ids int32 [S]) -> None`."""
    size: int = problem["vocab_size"]
    pdl, block = supports_pdl(), 128

    def apply(
        logits: Tensor, chosen: Tensor, slots: Tensor, last_token: Tensor, ids: Tensor
    ) -> None:
        if len(ids):
            _note_tokens[(triton.cdiv(len(ids), block),)](
                logits,
                chosen,
                slots,
                last_token,
                ids,
                len(ids),
                logits.stride(0),
                V=size,
                BLOCK=block,
                PDL=pdl,
                launch_pdl=pdl,
            )

    ints, longs = precompile.blank("int32", 1), precompile.blank("int64", 1)
    precompile.compile_for(
        apply, precompile.blank(problem["dtype"], 1, size), longs, longs, ints, ints
    )
    return apply
