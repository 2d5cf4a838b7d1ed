"""Input generators for the ops of `contracts.mla`, used by the conformance kit and the benchmarks.

Each takes a problem, the number of rows, a device, a random generator, and whether inputs are strided views.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from tokenspeed_testing.inputs import random, random_rows
from torch import Generator, Tensor, device

from tokenspeed_core.api import Problem
from tokenspeed_kernels.inputs import EPS, MAX_POSITION
from tokenspeed_kernels.reference.cache import MIN_SHARING_ROWS

LENGTHS = (37, 1, 0, 64, 130, 8, 65, 300)  # of decodes
# Query tokens and lengths of prefills. A row of length 0 is padding.
PREFILLS = ((9, 9), (5, 40), (1, 1), (3, 0), (30, 30), (1, 130), (17, 50))
UNWRITTEN = 440.0  # fills unwritten memory; not NaN, because inputs are compared to detect writes


def mla_write(
    problem: Problem, num: int, at: device, seed: Generator, strided: bool
) -> dict[str, Any]:
    """Make queries, latents before the norm, the cache of one of two layers, and distinct slots; every fifth slot is -1."""
    latent_size, rope_size = problem["latent_size"], problem["rope_size"]
    width, block_size = latent_size + rope_size, problem["block_size"]
    num_blocks = num // block_size + 3
    shape = (num_blocks, 2, block_size, width)
    arena = torch.zeros(shape, dtype=getattr(torch, problem["kv_dtype"]), device=at)
    slots = torch.randperm(num_blocks * block_size, generator=seed)[:num]
    slots[::5] = -1
    half = rope_size // 2
    angles = torch.arange(MAX_POSITION)[:, None] / 10000 ** (torch.arange(half) / half)
    positions = torch.randint(0, MAX_POSITION, (num,), generator=seed)
    heads, head_size = problem["num_heads"], problem["nope_size"] + rope_size
    return {
        "q": random((num, heads, head_size), problem, at, seed),
        "kv": random_rows(num, width, problem, at, seed, strided),
        "norm_weight": 1 + random((latent_size,), problem, at, seed) / 4,
        "eps": EPS,
        "positions": positions.to(at),
        "cos_sin": torch.cat([angles.cos(), angles.sin()], dim=1).to(at),
        "interleaved": num % 2 == 0,
        "cache": arena[:, 1],
        "slots": slots.to(at),
        "kv_scale": 1.0 if num % 3 else 0.5,
    }


def mla_absorb(
    problem: Problem, num: int, at: device, seed: Generator, strided: bool
) -> dict[str, Any]:
    """Make q [T, H, N + R] and an expansion of unit gain."""
    size = problem["nope_size"] + problem["rope_size"]
    q = _heads(num, problem["num_heads"], size, problem, at, seed, strided)
    return {"q": q, "kv_up": _expansion(problem, at, seed, problem["nope_size"])}


def mla_project(
    problem: Problem, num: int, at: device, seed: Generator, strided: bool
) -> dict[str, Any]:
    """Make x [T, H, L] and an expansion of unit gain."""
    heads = problem["num_heads"]
    x = _heads(num, heads, problem["latent_size"], problem, at, seed, strided)
    kv_up = _expansion(problem, at, seed, problem["latent_size"])
    return {"x": x, "kv_up": kv_up, "out": _unwritten(num, problem, at)}


def mla_decode(
    problem: Problem, num: int, at: device, seed: Generator, strided: bool
) -> dict[str, Any]:
    """Make rows of various lengths in scattered blocks of the second of two layers. Unused table entries are -1.

    From `MIN_SHARING_ROWS` rows on, they also share their first two blocks, except for the third and rows of length 0.
    """
    lengths = [LENGTHS[row % len(LENGTHS)] for row in range(num)]
    longest, shared = max(LENGTHS), None
    if num >= MIN_SHARING_ROWS:
        num_shared = 2 * problem["block_size"]
        lengths = [length and num_shared + length for length in lengths]
        longest += num_shared
        each = [num_shared if length and row != 2 else 0 for row, length in enumerate(lengths)]
        shared = torch.tensor([num_shared, 1, *each], dtype=torch.int32, device=at)
    cache, table = _filled_cache(problem, lengths, longest, at, seed, strided)
    if shared is not None:
        table[shared[2:] > 0, :2] = table[1, :2]
    width = problem["latent_size"] + problem["rope_size"]
    return {
        "q": _heads(num, problem["num_heads"], width, problem, at, seed, strided),
        "cache": cache,
        "block_table": table,
        "seq_lens": torch.tensor(lengths, dtype=torch.int32, device=at),
        "max_seq_len": longest,
        "scale": width**-0.5,
        "shared": shared,
    }


def find_shared_prefix(
    problem: Problem, num: int, at: device, seed: Generator, strided: bool
) -> dict[str, Any]:
    """Make rows that share most blocks of the shortest one. Every ninth row has length 0 and an unused table.

    One row shares no block. From 32 rows on, reading the shared blocks once pays; from 22 rows on, the table's shape allows it.
    """
    num_blocks = 12000 // problem["block_size"]
    wide = torch.randint(0, 1000, (1, num_blocks + 3), generator=seed, dtype=torch.int32)
    table = wide.repeat(num, 1)
    lengths = torch.randint(10000, 11901, (num,), generator=seed, dtype=torch.int32)
    table[1::2, 9600 // problem["block_size"] :] += 1
    table[::9], lengths[::9] = -1, 0
    table[7:8] += 1000
    used = table.to(at)[:, :num_blocks]
    return {
        "block_table": used if strided else used.contiguous(),
        "seq_lens": lengths.to(at),
    }


def mla_prefill(
    problem: Problem, num: int, at: device, seed: Generator, strided: bool
) -> dict[str, Any]:
    """Make rows with and without earlier tokens, and padding queries after them.

    The host knows the lengths for odd numbers of rows only. Entries are expanded 48 at a time.
    """
    rows = [PREFILLS[row % len(PREFILLS)] for row in range(num)]
    lengths = [length for _, length in rows]
    starts = list(accumulate((count for count, _ in rows), initial=0))
    longest = max(length for _, length in PREFILLS)
    cache, table = _filled_cache(problem, lengths, longest, at, seed, strided)
    num_tokens = starts[-1] + 2
    size = problem["nope_size"] + problem["rope_size"]
    return {
        "q": _heads(num_tokens, problem["num_heads"], size, problem, at, seed, strided),
        "cache": cache,
        "kv_up": _expansion(problem, at, seed, problem["latent_size"]),
        "query_start": torch.tensor(starts, dtype=torch.int32, device=at),
        "seq_lens": torch.tensor(lengths, dtype=torch.int32, device=at),
        "block_table": table,
        "host_query_start": tuple(starts) if num % 2 else None,
        "host_seq_lens": tuple(lengths) if num % 2 else None,
        "max_expanded": 48,
        "scale": size**-0.5,
        "out": _unwritten(num_tokens, problem, at),
    }


def _heads(
    num: int, heads: int, size: int, problem: Problem, at: device, seed: Generator, strided: bool
) -> Tensor:
    """Make [num, heads, size], as a view of more heads if strided."""
    wide = random((num, heads + 2, size), problem, at, seed)
    part = wide[:, 1 : heads + 1]
    return part if strided else part.contiguous()


def _expansion(problem: Problem, at: device, seed: Generator, fan_in: int) -> Tensor:
    """Make kv_up [H, N + V, L], scaled for sums over `fan_in` values."""
    rows = problem["nope_size"] + problem["value_size"]
    shape = (problem["num_heads"], rows, problem["latent_size"])
    return random(shape, problem, at, seed).div_(fan_in**0.5)


def _unwritten(num: int, problem: Problem, at: device) -> Tensor:
    shape = (num, problem["num_heads"], problem["value_size"])
    return torch.full(shape, UNWRITTEN, dtype=getattr(torch, problem["dtype"]), device=at)


def _filled_cache(
    problem: Problem, lengths: list[int], longest: int, at: device, seed: Generator, strided: bool
) -> tuple[Tensor, Tensor]:
    """Make the cache of the second of two layers and a block table for rows of these lengths."""
    size, width = problem["block_size"], problem["latent_size"] + problem["rope_size"]
    num_blocks = -(-longest // size) + 1
    num_entries = len(lengths) * num_blocks + 1
    shape = (num_entries, 2, size, width)
    arena = torch.full(shape, UNWRITTEN, dtype=getattr(torch, problem["kv_dtype"]))
    table = torch.full((len(lengths), num_blocks + 3), -1, dtype=torch.int32)
    order = iter(torch.randperm(num_entries, generator=seed).tolist())
    for row, length in enumerate(lengths):
        for index, first in enumerate(range(0, length, size)):
            table[row, index] = block = next(order)
            filled = arena[block, 1, : min(size, length - first)]
            filled.copy_(torch.randn(filled.shape, generator=seed))
    used = table.to(at)[:, :num_blocks]
    return arena.to(at)[:, 1], used if strided else used.contiguous()
