"""Writes to the paged KV cache, and updates of the slots' device state in each step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tokenspeed_core.api import Problem

# With up to 8 rows, the L2 cache already saves as much time as the extra launch of shared-prefix attention costs.
MIN_SHARING_ROWS = 9
# At least the number from which `AttentionStep.shares_prefix` is set.
MIN_SHARED_TOKENS = 256
# Shared tokens times rows from which latent attention reads shared entries once. For fewer, one more launch and more
# parts to merge cost more than that saves, because repeated reads hit the L2 cache. On an H100 with 16 heads, 32 rows
# that share 4,096 tokens got slower, and 64 rows faster.
MIN_SHARED_READS = 262_144
# The search for a shared prefix compares rows at a depth of 256 tokens, and then at depths that grow by this factor.
DEPTH_FACTOR = 4
# The search tries at most this many rows, evenly spaced, first to find a group and then for the length of its prefix.
MAX_CANDIDATES = 32


def as_bytes(x: Tensor) -> Tensor:
    """Return FP8 tensors as a view of bytes, which torch can index, and others unchanged."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype.itemsize > 1:
        return x.to(dtype)
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype)


def write_kv(problem: Problem) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]:
    """Return `write(k [T, K, D], v [T, K, V], k_cache [B, block_size, K, D], v_cache, slots [T]) -> None`.

    A slot of -1 writes nothing. Values are clamped to the range of an FP8 cache. On CUDA, looking for such slots
    synchronizes with the device.
    """
    block_size: int = problem["block_size"]

    def write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        if slots.numel() and slots.min() < 0:
            kept = slots >= 0
            k, v, slots = k[kept], v[kept], slots[kept]
        index = (slots // block_size, slots % block_size)
        for cache, new in ((k_cache, k), (v_cache, v)):
            as_bytes(cache).index_put_(index, as_bytes(narrowed(new, cache.dtype)))

    return write


def advance_rows(problem: Problem) -> Callable[..., None]:
    """Return `apply(state, words, values, slots, advance, token_ids, positions, seq_lens, ends, first, num_slots)`.

    Updates words of the slots' state, copies out tokens and positions of decode rows, and advances lengths.
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
    if len(words):
        state.index_copy_(0, words, values)
    all_tokens = state[first : first + num_slots]
    all_lengths = state[first + num_slots : first + 2 * num_slots]
    num_decodes = len(token_ids)
    if num_decodes:
        token_ids.copy_(all_tokens[slots[:num_decodes]])
    lengths = all_lengths[slots]
    positions.copy_(lengths[:num_decodes])
    torch.add(lengths, advance, out=seq_lens)
    ends.copy_(seq_lens)
    all_lengths.index_copy_(0, slots, seq_lens)


def map_tokens(
    problem: Problem,
) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]:
    """Return `map(table [N, B], slots [R], token_slots [T], positions [T], rows [R, B], mapping [T]) -> None`.

    Gathers the block tables of the rows, and computes the KV slot of each token.
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


def gather_tokens(problem: Problem) -> Callable[..., None]:
    """Return `gather(state, words, slots, until_end, token_ids, positions, new_positions, first, num_slots)`.

    Reads the query tokens of rows with draft tokens, and computes their positions (see the contract).
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
    token_ids.copy_(state[words])
    torch.sub(state[first + num_slots + slots], until_end, out=positions)
    torch.add(positions, 1, out=new_positions)


def find_shared_prefix(problem: Problem) -> Callable[[Tensor, Tensor], Tensor | None]:
    """Return `find(block_table int32 [S, M], seq_lens int32 [S]) -> shared int32 [2 + S] or None` (see the contract)."""
    block_size: int = problem["block_size"]

    def find(block_table: Tensor, seq_lens: Tensor) -> Tensor | None:
        num_rows, max_len = seq_lens.shape[0], block_table.shape[1] * block_size
        if num_rows < MIN_SHARING_ROWS or num_rows * max_len < MIN_SHARED_READS:
            return None
        lead = _leading_row(block_table, seq_lens, block_size, max_len)
        column = torch.arange(block_table.shape[1], device=block_table.device)
        is_inside = column < (seq_lens.unsqueeze(1) - 1) // block_size
        is_equal = (block_table == block_table.index_select(0, lead)) & is_inside
        num_tokens = is_equal.to(torch.int32).cumprod(1).sum(1) * block_size
        numbers = num_tokens[:: -(-num_rows // MAX_CANDIDATES)]
        num_sharing = (num_tokens >= numbers.unsqueeze(1)).sum(1)
        reads = numbers * num_sharing
        pays = (num_sharing >= MIN_SHARING_ROWS) & (numbers >= MIN_SHARED_TOKENS)
        reads = torch.where(pays & (reads >= MIN_SHARED_READS), reads, 0)
        # Of candidates that save the same number of reads, the longest prefix.
        best = torch.where((reads == reads.max()) & (reads > 0), numbers, 0).max()
        each = torch.where(num_tokens >= best, best, 0)
        shared = torch.cat((best.view(1), torch.where(best > 0, lead, 0), each))
        return shared.to(torch.int32)

    return find


def _leading_row(table: Tensor, seq_lens: Tensor, block_size: int, max_len: int) -> Tensor:
    """Return the index [1] of a row in the group with the most rows times depth, at a few depths; 0 without a group."""
    step = -(-table.shape[0] // MAX_CANDIDATES)
    lead = torch.zeros(1, dtype=torch.int64, device=table.device)
    most, goes_on = lead, lead == 0
    depth = MIN_SHARED_TOKENS
    while depth < max_len:
        num_blocks = -(-depth // block_size)
        is_longer = seq_lens > num_blocks * block_size
        blocks = torch.where(is_longer, table[:, num_blocks - 1], -1)
        counts = ((blocks == blocks[::step].unsqueeze(1)) & is_longer).sum(1) * is_longer[::step]
        count, first = counts.max(0, keepdim=True)[0], counts.argmax(0, keepdim=True) * step
        goes_on = goes_on & (count >= MIN_SHARING_ROWS)
        tokens = torch.where(goes_on, count * depth, 0)
        lead = torch.where(tokens > most, first, lead)
        most = torch.maximum(most, tokens)
        depth *= DEPTH_FACTOR
    return lead
