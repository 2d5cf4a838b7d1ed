"""The op `mask_logits`: set the logits of tokens that a grammar forbids to -inf, in one pass that writes only these.

Bit t % 32 of word t // 32 is 1 if token t is allowed.
"""

from __future__ import annotations

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from tokenspeed_core.api import Problem
from tokenspeed_kernels.triton import precompile

BLOCK = 2048  # logits that a program handles


@precompile.jit(do_not_specialize_on_alignment=["logits_ptr", "rows_ptr", "words_ptr"])
def _mask_logits(
    logits_ptr,
    rows_ptr,
    words_ptr,
    stride,
    V: tl.constexpr,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < V
    word = tl.load(words_ptr + index * W + token // 32, mask=inside, other=-1)
    is_forbidden = inside & (((word >> (token % 32)) & 1) == 0)
    row = tl.load(rows_ptr + index)
    tl.store(logits_ptr + row * stride + token, float("-inf"), mask=is_forbidden)


def mask_logits(problem: Problem) -> Callable[[Tensor, Tensor, Tensor], None]:
    """Return `mask(logits [S, V], rows int64 [P], words int32 [P, W]) -> None`."""
    size: int = problem["vocab_size"]
    num_words = -(-size // 32)

    def apply(logits: Tensor, rows: Tensor, words: Tensor) -> None:
        if len(rows):
            _mask_logits[(len(rows), triton.cdiv(size, BLOCK))](
                logits, rows, words, logits.stride(0), V=size, W=num_words, BLOCK=BLOCK
            )

    precompile.compile_for(
        apply,
        precompile.blank(problem["dtype"], 1, size),
        precompile.blank("int64", 1),
        precompile.blank("int32", 1, num_words),
    )
    return apply
