"""Inputs for the common ops, by problem: seeded, awkwardly strided if asked, with poison where nobody reads.

Each generator takes the problem, a number of tokens (rows), a device, a torch.Generator on the CPU and
whether to make inputs non-contiguous; it returns the arguments of the kernel by name, in their order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor, device

from tokenspeed_core.kernels.ops import Problem

EPS = 1e-6
MAX_POSITION = 512


def rms_norm(problem: Problem, num: int, at: device, seed: Generator, strided: bool) -> dict[str, Any]:
    """Make x [T, N], or heads [T, 3, N] cut from wider rows if strided; weight [N]."""
    size = problem["size"]
    x = _random((num, 5, size), problem, at, seed)[:, 1:4] if strided else _random((num, size), problem, at, seed)
    return {"x": x, "weight": _weight(size, problem, at, seed), "eps": EPS}


def add_rms_norm(problem: Problem, num: int, at: device, seed: Generator, strided: bool) -> dict[str, Any]:
    """Make x and residual [T, N], weight [N]."""
    size = problem["size"]
    return {
        "x": _rows(num, size, problem, at, seed, strided),
        "residual": _rows(num, size, problem, at, seed, strided),
        "weight": _weight(size, problem, at, seed),
        "eps": EPS,
    }


def rope(problem: Problem, num: int, at: device, seed: Generator, strided: bool) -> dict[str, Any]:
    """Make q and k as views of one [T, H + 2K, D] tensor if strided; interleaved pairs for even T."""
    heads, kv_heads, size = problem["num_heads"], problem["num_kv_heads"], problem["head_size"]
    if strided:
        qkv = _random((num, heads + 2 * kv_heads, size), problem, at, seed)
        q, k = qkv[:, :heads], qkv[:, heads : heads + kv_heads]
    else:
        q = _random((num, heads, size), problem, at, seed)
        k = _random((num, kv_heads, size), problem, at, seed)
    half = problem["rotary_size"] // 2
    angles = torch.arange(MAX_POSITION)[:, None] / 10000 ** (torch.arange(half) / half)
    positions = torch.randint(0, MAX_POSITION, (num,), generator=seed)
    return {
        "q": q, "k": k, "positions": positions.to(at),
        "cos_sin": torch.cat([angles.cos(), angles.sin()], dim=1).to(at), "interleaved": num % 2 == 0,
    }


def qk_norm_rope(problem: Problem, num: int, at: device, seed: Generator, strided: bool) -> dict[str, Any]:
    """As rope, with weights [D]."""
    size = problem["head_size"]
    given = rope(problem, num, at, seed, strided)
    q, k = given.pop("q"), given.pop("k")
    weights = {name: _weight(size, problem, at, seed) for name in ("q_weight", "k_weight")}
    return {"q": q, "k": k, **weights, "eps": EPS, **given}


def silu_mul(problem: Problem, num: int, at: device, seed: Generator, strided: bool) -> dict[str, Any]:
    """Make x [T, 2N]."""
    return {"x": _rows(num, 2 * problem["size"], problem, at, seed, strided)}


def linear(problem: Problem, num: int, at: device, seed: Generator, strided: bool) -> dict[str, Any]:
    """Make x [T, I], weight [O, I] of unit gain, a bias [O] for even T."""
    inner, outer = problem["in_size"], problem["out_size"]
    weight = _random((outer, inner), problem, at, seed) / inner**0.5
    bias = _weight(outer, problem, at, seed) if num % 2 == 0 else None
    return {"x": _rows(num, inner, problem, at, seed, strided), "weight": weight, "bias": bias}


def moe_route(problem: Problem, num: int, at: device, seed: Generator, strided: bool) -> dict[str, Any]:
    """Make logits [T, E]."""
    logits = _rows(num, problem["num_experts"], problem, at, seed, strided)
    return {"logits": logits, "top_k": problem["top_k"], "renormalize": num % 2 == 0}


def moe_experts(problem: Problem, num: int, at: device, seed: Generator, strided: bool) -> dict[str, Any]:
    """Make x [T, N], weights of unit gain, distinct expert ids for each token; some experts get no token."""
    experts, k = problem["num_experts"], problem["top_k"]
    size, inner = problem["hidden_size"], problem["intermediate_size"]
    ids = torch.rand((num, experts), generator=seed).argsort(dim=1)[:, :k].to(torch.int32)
    return {
        "x": _rows(num, size, problem, at, seed, strided),
        "gate_up": _random((experts, 2 * inner, size), problem, at, seed) / size**0.5,
        "down": _random((experts, size, inner), problem, at, seed) / inner**0.5,
        "weights": torch.rand((num, k), generator=seed).to(at),
        "ids": ids.to(at),
    }


def write_kv(problem: Problem, num: int, at: device, seed: Generator, strided: bool) -> dict[str, Any]:
    """Make k and v [T, K, D]; caches of one of two layers of an arena; distinct slots, every fifth one -1."""
    heads, size, block = problem["num_kv_heads"], problem["head_size"], problem["block_size"]
    num_blocks = num // block + 3
    dtype = getattr(torch, problem["kv_dtype"])
    arena = torch.zeros((num_blocks, 2, 2, block, heads, size), dtype=dtype, device=at)
    slots = torch.randperm(num_blocks * block, generator=seed)[:num]
    slots[::5] = -1
    wide = _random((num, 3 * heads, size), problem, at, seed)
    k, v = (wide[:, :heads], wide[:, heads : 2 * heads]) if strided else (
        wide[:, :heads].contiguous(), wide[:, heads : 2 * heads].contiguous()
    )
    return {"k": k, "v": v, "k_cache": arena[:, 1, 0], "v_cache": arena[:, 1, 1], "slots": slots.to(at)}


def greedy(problem: Problem, num: int, at: device, seed: Generator, strided: bool) -> dict[str, Any]:
    """Make logits [S, V], coarse enough to have equal ones."""
    return {"logits": (_rows(num, problem["vocab_size"], problem, at, seed, strided) * 2).round() / 2}


def sample(problem: Problem, num: int, at: device, seed: Generator, strided: bool) -> dict[str, Any]:
    """Make logits float32 [S, V] and every mix of filters, temperature 0 included."""
    logits = _rows(num, problem["vocab_size"], {"dtype": "float32"}, at, seed, strided) * 3
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


def _random(shape: tuple[int, ...], problem: Problem, at: device, seed: Generator) -> Tensor:
    return torch.randn(shape, generator=seed).to(getattr(torch, problem["dtype"])).to(at)


def _rows(num: int, size: int, problem: Problem, at: device, seed: Generator, strided: bool) -> Tensor:
    if not strided:
        return _random((num, size), problem, at, seed)
    return _random((num, size + 48), problem, at, seed)[:, 16 : 16 + size]


def _weight(size: int, problem: Problem, at: device, seed: Generator) -> Tensor:
    return 1 + _random((size,), problem, at, seed) / 4
