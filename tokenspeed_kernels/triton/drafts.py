"""The ops `gather_tokens` and `verify_drafts`: bookkeeping of steps with draft tokens, before and after the forward.

Each op is one small kernel. Torch would launch five and fourteen kernels.
"""

from __future__ import annotations

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_core.api import Problem
from tokenspeed_kernels.triton import precompile
from tokenspeed_kernels.triton.pdl import supports_pdl

BLOCK = 128  # tokens or rows of a program


@precompile.jit(
    do_not_specialize=["num_tokens", "lengths"],
    do_not_specialize_on_alignment=[
        "words_ptr",
        "slots_ptr",
        "until_end_ptr",
        "token_ids_ptr",
        "positions_ptr",
        "new_positions_ptr",
    ],
)
def _gather_tokens(
    state_ptr,
    words_ptr,
    slots_ptr,
    until_end_ptr,
    token_ids_ptr,
    positions_ptr,
    new_positions_ptr,
    num_tokens,
    lengths,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Gather the token ids and positions of query tokens. Grid (blocks of tokens).

    `lengths` is the word of the first slot's length.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < num_tokens
    word = tl.load(words_ptr + token, mask=inside, other=0)
    slot = tl.load(slots_ptr + token, mask=inside, other=0)
    length = tl.load(state_ptr + lengths + slot, mask=inside, other=0)
    position = length - tl.load(until_end_ptr + token, mask=inside, other=0)
    token_id = tl.load(state_ptr + word, mask=inside, other=0)
    tl.store(token_ids_ptr + token, token_id.to(tl.int64), mask=inside)
    tl.store(positions_ptr + token, position, mask=inside)
    tl.store(new_positions_ptr + token, position + 1, mask=inside)


def gather_tokens(problem: Problem) -> Callable[..., None]:
    """Return `gather(state, words, slots, until_end, token_ids, positions, new_positions, first, num_slots)`.

    See the op's contract for shapes and meaning.
    """
    del problem
    pdl = supports_pdl()

    def apply(
        state: Tensor,
        words: Tensor,
        slots: Tensor,
        until_end: Tensor,
        token_ids: Tensor,
        positions: Tensor,
        new_positions: Tensor,
        first: int,
        num_slots: int,
    ) -> None:
        if len(words):
            _gather_tokens[(triton.cdiv(len(words), BLOCK),)](
                state,
                words,
                slots,
                until_end,
                token_ids,
                positions,
                new_positions,
                len(words),
                first + num_slots,
                BLOCK=BLOCK,
                PDL=pdl,
                launch_pdl=pdl,
            )

    ints, longs = precompile.blank("int32", 1), precompile.blank("int64", 1)
    precompile.compile_for(apply, ints, longs, longs, longs, longs, longs, longs, 0, 1)
    return apply


@precompile.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=[
        "ids_ptr",
        "token_ids_ptr",
        "tokens_ptr",
        "first_ptr",
        "num_drafts_ptr",
        "slots_ptr",
        "ends_ptr",
        "last_token_ptr",
        "seq_len_ptr",
        "num_new_ptr",
    ],
)
def _verify_drafts(
    ids_ptr,
    token_ids_ptr,
    tokens_ptr,
    first_ptr,
    num_drafts_ptr,
    slots_ptr,
    ends_ptr,
    last_token_ptr,
    seq_len_ptr,
    num_new_ptr,
    num_rows,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Count the accepted draft tokens of each row, one row per lane. Grid (blocks of rows)."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    first = tl.load(first_ptr + row, mask=inside, other=0)
    num_drafts = tl.load(num_drafts_ptr + row, mask=inside, other=0)
    accepted = tl.zeros([BLOCK], dtype=tl.int64)
    # Position of the next draft token while all before it are right, then the number of draft tokens.
    next_draft = tl.zeros([BLOCK], dtype=tl.int64)
    while tl.max((next_draft < num_drafts).to(tl.int32), axis=0) > 0:
        is_left = next_draft < num_drafts
        chosen = tl.load(ids_ptr + first + next_draft, mask=is_left, other=-1)
        token = tl.load(tokens_ptr + first + next_draft, mask=is_left, other=0)
        draft = tl.load(token_ids_ptr + token + 1, mask=is_left, other=0)
        is_right = is_left & (chosen.to(tl.int64) == draft)
        accepted += is_right.to(tl.int64)
        next_draft = tl.where(is_right, next_draft + 1, num_drafts)
    newest = tl.load(ids_ptr + first + accepted, mask=inside, other=0)
    slot = tl.load(slots_ptr + row, mask=inside, other=0)
    end = tl.load(ends_ptr + row, mask=inside, other=0) - num_drafts + accepted
    tl.store(last_token_ptr + slot, tl.maximum(newest, 0), mask=inside)
    tl.store(seq_len_ptr + slot, end.to(tl.int32), mask=inside)
    tl.store(num_new_ptr + row, (accepted + 1).to(tl.int32), mask=inside)


def verify_drafts(problem: Problem) -> Callable[..., None]:
    """Return `verify(ids, token_ids, tokens, first, num_drafts, slots, ends, last_token, seq_len, num_new, max_drafts)`.

    See the op's contract for shapes and meaning.
    """
    del problem
    pdl = supports_pdl()

    def apply(
        ids: Tensor,
        token_ids: Tensor,
        tokens: Tensor,
        first: Tensor,
        num_drafts: Tensor,
        slots: Tensor,
        ends: Tensor,
        last_token: Tensor,
        seq_len: Tensor,
        num_new: Tensor,
        max_drafts: int,
    ) -> None:
        if len(slots):
            _verify_drafts[(triton.cdiv(len(slots), BLOCK),)](
                ids,
                token_ids,
                tokens,
                first,
                num_drafts,
                slots,
                ends,
                last_token,
                seq_len,
                num_new,
                len(slots),
                BLOCK=BLOCK,
                PDL=pdl,
                launch_pdl=pdl,
            )

    ints, longs = precompile.blank("int32", 1), precompile.blank("int64", 1)
    precompile.compile_for(
        apply, ints, longs, longs, longs, longs, longs, ints, ints, ints, ints, 1
    )
    return apply
