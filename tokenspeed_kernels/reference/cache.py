"""Writing keys and values into the paged cache, and what slots of sequences know of it from step to step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tokenspeed_core.api import Problem


def as_bytes(x: Tensor) -> Tensor:
    """Return a view of eight-bit floats as bytes, which torch can index; other tensors as they are."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def _narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype.itemsize > 1:
        return x.to(dtype)
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype)


def write_kv(problem: Problem) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]:
    """Return `write(k [T, K, D], v, k_cache [B, block_size, K, D], v_cache, slots [T]) -> None`.

    A slot of -1 writes nothing; values beyond the cache's type become its largest. On a CUDA device the skip waits
    for the device.
    """
    block_size: int = problem["block_size"]

    def write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        if slots.numel() and slots.min() < 0:
            kept = slots >= 0
            k, v, slots = k[kept], v[kept], slots[kept]
        index = (slots // block_size, slots % block_size)
        for cache, new in ((k_cache, k), (v_cache, v)):
            as_bytes(cache).index_put_(index, as_bytes(_narrowed(new, cache.dtype)))

    return write


def advance_rows(problem: Problem) -> Callable[..., None]:
    """Return `apply(state, words, values, slots, advance, token_ids, positions, seq_lens, ends, first, num_slots)`.

    It changes words of the slots' state, gives decodes their tokens and positions, and moves lengths on.
    """
    del problem
    return _advance


def _advance(
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
    state.index_copy_(0, words, values)
    heads = state[first : first + 2 * num_slots].view(2, num_slots)
    tokens, lengths = heads[:, slots]
    token_ids.copy_(tokens[: len(token_ids)])
    positions.copy_(lengths[: len(positions)])
    torch.add(lengths, advance, out=seq_lens)
    ends.copy_(seq_lens)
    heads[1].index_copy_(0, slots, seq_lens)


def map_tokens(
    problem: Problem,
) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]:
    """Return `map(table [N, B], slots [R], token_slots [T], positions [T], rows [R, B], mapping [T]) -> None`.

    It gathers the block tables of rows, and says where in the cache each token's key goes.
    """
    block_size: int = problem["block_size"]

    def map_(
        table: Tensor,
        slots: Tensor,
        token_slots: Tensor,
        positions: Tensor,
        rows: Tensor,
        mapping: Tensor,
    ) -> None:
        torch.index_select(table, 0, slots, out=rows)
        blocks = table[token_slots, positions // block_size]
        torch.add(positions % block_size, blocks, alpha=block_size, out=mapping)

    return map_
