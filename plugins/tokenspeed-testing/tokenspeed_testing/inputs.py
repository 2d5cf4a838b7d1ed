"""Input generators for the common ops.

Each takes the problem, the number of tokens (rows), a device, a torch.Generator on the CPU, and
whether inputs are non-contiguous. It returns the kernel's arguments by name, in order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor, device

from tokenspeed_core.api.ops import Problem


def write_kv(
    problem: Problem, num: int, at: device, seed: Generator, strided: bool
) -> dict[str, Any]:
    """Make k [T, K, D] and v [T, K, V], caches of one of two layers, and distinct KV slots; every fifth is -1."""
    heads, size, block = problem["num_kv_heads"], problem["head_size"], problem["block_size"]
    value_head_size = problem.get("value_head_size") or size  # fused ops have no such axis
    num_blocks = num // block + 3
    dtype = getattr(torch, problem["kv_dtype"])
    num_values = block * heads * (size + value_head_size)
    arena = torch.zeros((num_blocks, 2, num_values), dtype=dtype, device=at)
    k_cache, v_cache = split_blocks(arena[:, 1], block, heads, size, value_head_size)
    slots = torch.randperm(num_blocks * block, generator=seed)[:num]
    slots[::5] = -1
    widths = [heads * size, heads * value_head_size, heads * size]
    wide = random((num, sum(widths)), problem, at, seed)
    parts = torch.split(wide, widths, dim=1)
    k, v = parts[0].view(num, heads, size), parts[1].view(num, heads, value_head_size)
    if not strided:
        k, v = k.contiguous(), v.contiguous()
    return {
        "k": k,
        "v": v,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "slots": slots.to(at),
    }


def split_blocks(
    blocks: Tensor, block_size: int, num_heads: int, head_size: int, value_head_size: int
) -> tuple[Tensor, Tensor]:
    """Return the keys [B, block_size, K, D] and values [B, block_size, K, V] in one layer's blocks [B, values]."""
    num_keys = block_size * num_heads * head_size
    return (
        blocks[:, :num_keys].view(-1, block_size, num_heads, head_size),
        blocks[:, num_keys:].view(-1, block_size, num_heads, value_head_size),
    )


def greedy(
    problem: Problem, num: int, at: device, seed: Generator, strided: bool
) -> dict[str, Any]:
    """Make logits [S, V] with ties."""
    return {
        "logits": (random_rows(num, problem["vocab_size"], problem, at, seed, strided) * 2).round()
        / 2
    }


def sample(
    problem: Problem, num: int, at: device, seed: Generator, strided: bool
) -> dict[str, Any]:
    """Make float32 logits [S, V] and all combinations of filters, including temperature 0."""
    logits = random_rows(num, problem["vocab_size"], {"dtype": "float32"}, at, seed, strided) * 3
    row = torch.arange(num)
    return {
        "logits": logits,
        "temperature": torch.tensor([1.0, 0.0, 0.7, 1.5, 0.01])[row % 5].to(at),
        "top_k": torch.tensor([0, 1, 5, 40, 0, 0, 7])[row % 7].to(torch.int32).to(at),
        "top_p": torch.tensor([1.0, 0.9, 0.5, 1.0, 1e-6, 0.99])[row % 6].to(at),
        "min_p": torch.tensor([0.0, 0.0, 0.05, 1.0])[row % 4].to(at),
        "seeds": torch.randint(-(2**62), 2**62, (num,), generator=seed).to(at),
        "positions": torch.randint(0, 100000, (num,), generator=seed).to(at),
    }


def random(shape: tuple[int, ...], problem: Problem, at: device, seed: Generator) -> Tensor:
    """Make a normally distributed tensor of the problem's dtype."""
    return torch.randn(shape, generator=seed).to(getattr(torch, problem["dtype"])).to(at)


def random_rows(
    num: int, size: int, problem: Problem, at: device, seed: Generator, strided: bool
) -> Tensor:
    """Make normally distributed rows [T, size], as a slice of wider rows if strided."""
    if not strided:
        return random((num, size), problem, at, seed)
    return random((num, size + 48), problem, at, seed)[:, 16 : 16 + size]
