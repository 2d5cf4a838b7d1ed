"""Inputs for the op `mla_decode`."""

from __future__ import annotations

from typing import Any

import torch
from tokenspeed_testing.inputs import random
from torch import Generator, device

from tokenspeed_core.api import Problem

LENGTHS = (37, 1, 0, 64, 130, 8, 65, 300)
UNWRITTEN = 3e4  # fills unwritten memory; not NaN, because inputs are compared to detect writes


def mla_decode(
    problem: Problem, num: int, at: device, seed: Generator, strided: bool
) -> dict[str, Any]:
    """Make rows of various lengths in scattered blocks of the second of two layers. Unused table entries are -1."""
    size, width = problem["block_size"], problem["latent_size"] + problem["rope_size"]
    lengths = [LENGTHS[row % len(LENGTHS)] for row in range(num)]
    num_blocks = -(-max(LENGTHS) // size) + 1
    num_entries = num * num_blocks + 1
    arena = torch.full(
        (num_entries, 2, size, width), UNWRITTEN, dtype=getattr(torch, problem["kv_dtype"])
    )
    wide_table = torch.full((num, num_blocks + 3), -1, dtype=torch.int32)
    table = wide_table[:, :num_blocks]
    order = iter(torch.randperm(num_entries, generator=seed).tolist())
    for row, length in enumerate(lengths):
        for index, first in enumerate(range(0, length, size)):
            table[row, index] = block = next(order)
            filled = arena[block, 1, : min(size, length - first)]
            filled.copy_(torch.randn(filled.shape, generator=seed))
    heads = problem["num_heads"]
    wide = random((num, heads + 2, width), problem, at, seed)
    q, table = wide[:, 1 : heads + 1], wide_table.to(at)[:, :num_blocks]
    if not strided:
        q, table = q.contiguous(), table.contiguous()
    return {
        "q": q,
        "cache": arena.to(at)[:, 1],
        "block_table": table,
        "seq_lens": torch.tensor(lengths, dtype=torch.int32, device=at),
        "max_seq_len": max(LENGTHS),
        "scale": width**-0.5,
    }
