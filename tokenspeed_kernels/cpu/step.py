"""The ops `advance_rows`, `map_tokens` and `gather_tokens` on CPUs: the bookkeeping of a step.

NumPy updates a few integers in less time than one torch call takes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor

from tokenspeed_core.api import Problem


def advance_rows(problem: Problem) -> Callable[..., None]:
    """Return `apply(state, words, values, slots, advance, token_ids, positions, seq_lens, ends, first, num_slots)`.

    See the op's contract for shapes and meaning.
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
    host_state, host_slots, num_decodes = state.numpy(), slots.numpy(), len(token_ids)
    host_state[words.numpy()] = values.numpy()
    tokens = host_state[first : first + num_slots]
    lengths = host_state[first + num_slots : first + 2 * num_slots]
    row_lengths = lengths[host_slots]
    if num_decodes:
        token_ids.numpy()[:] = tokens[host_slots[:num_decodes]]
        positions.numpy()[:] = row_lengths[:num_decodes]
    row_lengths += advance.numpy()
    lengths[host_slots] = row_lengths
    seq_lens.numpy()[:] = row_lengths
    ends.numpy()[:] = row_lengths


def map_tokens(
    problem: Problem,
) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]:
    """Return `map(table [N, B], slots [R], token_slots [T], positions [T], rows [R, B], mapping [T]) -> None`."""
    block_size: int = problem["block_size"]

    def apply(
        table: Tensor,
        slots: Tensor,
        token_slots: Tensor,
        positions: Tensor,
        rows: Tensor,
        mapping: Tensor,
    ) -> None:
        host_table = table.numpy()
        rows.numpy()[:] = host_table[slots.numpy()]
        indices, offsets = np.divmod(positions.numpy(), block_size)
        mapping.numpy()[:] = (
            host_table[token_slots.numpy(), indices] * np.int64(block_size) + offsets
        )

    return apply


def gather_tokens(problem: Problem) -> Callable[..., None]:
    """Return `gather(state, words, slots, until_end, token_ids, positions, new_positions, first, num_slots)`.

    See the op's contract for shapes and meaning.
    """
    del problem
    return _gather


def _gather(
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
    host_state, host_positions = state.numpy(), positions.numpy()
    token_ids.numpy()[:] = host_state[words.numpy()]
    lengths = host_state[first + num_slots : first + 2 * num_slots]
    np.subtract(lengths[slots.numpy()], until_end.numpy(), out=host_positions)
    np.add(host_positions, 1, out=new_positions.numpy())
