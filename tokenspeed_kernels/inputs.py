"""Input generators for the ops of `contracts`, used by the conformance kit and the benchmarks.

Each takes a problem, the number of rows, a device, a random generator, and whether inputs are strided views.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tokenspeed_testing.inputs import random, random_rows, write_kv
from torch import Generator, Tensor, device

from tokenspeed_core.api import Problem
from tokenspeed_kernels.reference.fp8 import quantize_rows
from tokenspeed_kernels.reference.fp8_block import quantize_blocks, quantize_groups

EPS = 1e-6
MAX_POSITION = 512


def rms_norm(
    problem: Problem, num: int, at: device, seed: Generator, strided: bool
) -> dict[str, Any]:
    """Make x [T, N] (strided: [T, 3, N], a view of wider rows, and a float32 weight) and weight [N]."""
    size = problem["size"]
    x = (
        random((num, 5, size), problem, at, seed)[:, 1:4]
        if strided
        else random((num, size), problem, at, seed)
    )
    return {"x": x, "weight": _norm_weight(size, problem, at, seed, strided), "eps": EPS}


def add_rms_norm(
    problem: Problem, num: int, at: device, seed: Generator, strided: bool
) -> dict[str, Any]:
    """Make x and residual [T, N], weight [N], which is float32 if strided."""
    size = problem["size"]
    return {
        "x": random_rows(num, size, problem, at, seed, strided),
        "residual": random_rows(num, size, problem, at, seed, strided),
        "weight": _norm_weight(size, problem, at, seed, strided),
        "eps": EPS,
    }


def rope(problem: Problem, num: int, at: device, seed: Generator, strided: bool) -> dict[str, Any]:
    """Make q and k as views of one [T, H + 2K, D] tensor if strided; interleaved pairs for even T."""
    heads, kv_heads, size = problem["num_heads"], problem["num_kv_heads"], problem["head_size"]
    if strided:
        qkv = random((num, heads + 2 * kv_heads, size), problem, at, seed)
        q, k = qkv[:, :heads], qkv[:, heads : heads + kv_heads]
    else:
        q = random((num, heads, size), problem, at, seed)
        k = random((num, kv_heads, size), problem, at, seed)
    half = problem["rotary_size"] // 2
    angles = torch.arange(MAX_POSITION)[:, None] / 10000 ** (torch.arange(half) / half)
    positions = torch.randint(0, MAX_POSITION, (num,), generator=seed)
    return {
        "q": q,
        "k": k,
        "positions": positions.to(at),
        "cos_sin": torch.cat([angles.cos(), angles.sin()], dim=1).to(at),
        "interleaved": num % 2 == 0,
    }


def qk_norm_rope(
    problem: Problem, num: int, at: device, seed: Generator, strided: bool
) -> dict[str, Any]:
    """Like `rope`, with norm weights [D], which are float32 if strided."""
    size = problem["head_size"]
    given = rope(problem, num, at, seed, strided)
    q, k = given.pop("q"), given.pop("k")
    weights = {
        name: _norm_weight(size, problem, at, seed, strided) for name in ("q_weight", "k_weight")
    }
    return {"q": q, "k": k, **weights, "eps": EPS, **given}


def silu_mul(
    problem: Problem, num: int, at: device, seed: Generator, strided: bool
) -> dict[str, Any]:
    """Make x [T, 2N]."""
    return {"x": random_rows(num, 2 * problem["size"], problem, at, seed, strided)}


def linear(
    problem: Problem, num: int, at: device, seed: Generator, strided: bool
) -> dict[str, Any]:
    """Make x [T, I], weight [O, I] of unit gain, a bias [O] for even T."""
    inner, outer = problem["in_size"], problem["out_size"]
    weight = random((outer, inner), problem, at, seed) / inner**0.5
    bias = _around_one(outer, problem, at, seed) if num % 2 == 0 else None
    return {
        "x": random_rows(num, inner, problem, at, seed, strided),
        "weight": weight,
        "bias": bias,
    }


def linear_silu_mul(
    problem: Problem, num: int, at: device, seed: Generator, strided: bool
) -> dict[str, Any]:
    """Make x [T, I] and weight [2O, I] of unit gain."""
    problem = {**problem, "out_size": 2 * problem["out_size"]}
    given = linear(problem, num, at, seed, strided)
    return {"x": given["x"], "weight": given["weight"]}


def linear_add(
    problem: Problem, num: int, at: device, seed: Generator, strided: bool
) -> dict[str, Any]:
    """Make x [T, I], weight [O, I] of unit gain, and total [T, O]."""
    given = linear(problem, num, at, seed, strided)
    total = random_rows(num, problem["out_size"], problem, at, seed, strided)
    return {"x": given["x"], "weight": given["weight"], "total": total}


def rope_write_kv(
    problem: Problem, num: int, at: device, seed: Generator, strided: bool
) -> dict[str, Any]:
    """Like `rope`, with v, caches and slots as for write_kv."""
    rotation = rope(problem, num, at, seed, strided)
    cache = write_kv(problem, num, at, seed, strided)
    return {"q": rotation.pop("q"), **cache, "k": rotation.pop("k"), **rotation}


def qk_norm_rope_write_kv(
    problem: Problem, num: int, at: device, seed: Generator, strided: bool
) -> dict[str, Any]:
    """Like `qk_norm_rope`, with v, caches and slots as for write_kv."""
    rotation = qk_norm_rope(problem, num, at, seed, strided)
    cache = write_kv(problem, num, at, seed, strided)
    return {"q": rotation.pop("q"), **cache, "k": rotation.pop("k"), **rotation}


def note_tokens(
    problem: Problem, num: int, at: device, seed: Generator, strided: bool
) -> dict[str, Any]:
    """Make logits [S, V] with some not finite, chosen ids inside and outside [0, V), and distinct slots."""
    size = problem["vocab_size"]
    logits = random_rows(num, size, problem, at, seed, strided)
    chosen = torch.randint(0, size, (num,), generator=seed)
    chosen[1::7], chosen[2::7] = -1, size
    for first, value in ((3, float("-inf")), (4, float("inf"))):
        logits[first::7] = value
    return {
        "logits": logits,
        "chosen": chosen.to(at),
        "slots": torch.randperm(2 * num, generator=seed)[:num].to(at),
        "last_token": torch.zeros(2 * num, dtype=torch.int32, device=at),
        "ids": torch.zeros(num, dtype=torch.int32, device=at),
    }


def mask_logits(
    problem: Problem, num: int, at: device, seed: Generator, strided: bool
) -> dict[str, Any]:
    """Make logits [S, V], indices of two thirds of their rows in random order, and random mask bits for these."""
    size = problem["vocab_size"]
    rows = torch.randperm(num, generator=seed)[: -(-num * 2 // 3)]
    low, high = -(2**31), 2**31
    words = torch.randint(low, high, (len(rows), -(-size // 32)), generator=seed)
    return {
        "logits": random_rows(num, size, problem, at, seed, strided),
        "rows": rows.to(at),
        "words": words.to(torch.int32).to(at),
    }


def advance_rows(
    problem: Problem, num: int, at: device, seed: Generator, strided: bool
) -> dict[str, Any]:
    """Make a state with some updated words, lengths among them, and a last padding slot that stays 0."""
    del problem, strided
    num_slots, first = 2 * num + 1, 7
    state = torch.randint(0, 1000, (first + 3 * num_slots,), generator=seed, dtype=torch.int32)
    padding = first + 2 * num_slots - 1  # the word of the padding slot's length
    state[padding] = 0
    words = torch.randperm(len(state) - 1, generator=seed)[: 3 * num]
    words[words == padding] = len(state) - 1
    words = torch.cat((words, torch.tensor([padding, padding])))
    slots = torch.randperm(num_slots - 1, generator=seed)[:num]
    slots[num // 2 :: 4] = num_slots - 1
    decodes = num * 2 // 3
    made = {
        "state": state,
        "words": words,
        "values": torch.where(words == padding, 0, words * 3 + 1).to(torch.int32),
        "slots": slots,
        "advance": torch.where(slots == num_slots - 1, 0, torch.arange(num) % 5 + 1).to(
            torch.int32
        ),
    }
    return {name: value.to(at) for name, value in made.items()} | {
        **{
            name: torch.zeros(decodes, dtype=torch.int64, device=at)
            for name in ("token_ids", "positions")
        },
        "seq_lens": torch.zeros(num, dtype=torch.int32, device=at),
        "ends": torch.zeros(num, dtype=torch.int64, device=at),
        "first": first,
        "num_slots": num_slots,
    }


def map_tokens(
    problem: Problem, num: int, at: device, seed: Generator, strided: bool
) -> dict[str, Any]:
    """Make block tables [N, B], slots of rows, and tokens of any slot at any position."""
    del strided
    num_slots, num_blocks, num_tokens = num + 2, 37, 3 * num
    table = torch.randint(0, 2**24, (num_slots, num_blocks), generator=seed, dtype=torch.int32)
    num_positions = num_blocks * problem["block_size"]
    return {
        "table": table.to(at),
        "slots": torch.randint(0, num_slots, (num,), generator=seed).to(at),
        "token_slots": torch.randint(0, num_slots, (num_tokens,), generator=seed).to(at),
        "positions": torch.randint(0, num_positions, (num_tokens,), generator=seed).to(at),
        "rows": torch.zeros((num, num_blocks), dtype=torch.int32, device=at),
        "mapping": torch.zeros(num_tokens, dtype=torch.int64, device=at),
    }


def gather_tokens(
    problem: Problem, num: int, at: device, seed: Generator, strided: bool
) -> dict[str, Any]:
    """Make a state, tokens anywhere in it, and distances of up to 9 from the lengths of slots, which are 9 or more."""
    del problem, strided
    num_slots, first, num_tokens = num + 2, 5, 3 * num
    state = torch.randint(9, 1000, (first + 4 * num_slots,), generator=seed, dtype=torch.int32)
    made = {
        "state": state,
        "words": torch.randint(0, len(state), (num_tokens,), generator=seed),
        "slots": torch.randint(0, num_slots, (num_tokens,), generator=seed),
        "until_end": torch.randint(0, 10, (num_tokens,), generator=seed),
    }
    return {name: value.to(at) for name, value in made.items()} | {
        **{
            name: torch.zeros(num_tokens, dtype=torch.int64, device=at)
            for name in ("token_ids", "positions", "new_positions")
        },
        "first": first,
        "num_slots": num_slots,
    }


def verify_drafts(
    problem: Problem, num: int, at: device, seed: Generator, strided: bool
) -> dict[str, Any]:
    """Make rows of 0 to 4 draft tokens after two other tokens. Most of them are right, and some ids are -1."""
    del problem, strided
    max_drafts, num_before = 4, 2
    num_drafts = torch.arange(num) * 3 % (max_drafts + 1)
    ends = torch.cumsum(num_drafts + 1, 0)
    num_sampled = int(ends[-1]) if num else 0
    token_ids = torch.randint(0, 3, (num_before + num_sampled,), generator=seed)
    ids = torch.cat((token_ids[num_before + 1 :], token_ids[:1]))[:num_sampled].to(torch.int32)
    ids[torch.rand(num_sampled, generator=seed) < 0.3] = 1
    ids[torch.rand(num_sampled, generator=seed) < 0.1] = -1
    num_slots = 2 * num
    made = {
        "ids": ids,
        "token_ids": token_ids,
        "tokens": torch.arange(num_sampled) + num_before,
        "first": ends - num_drafts - 1,
        "num_drafts": num_drafts,
        "slots": torch.randperm(num_slots, generator=seed)[:num],
        "ends": torch.randint(9, 1000, (num,), generator=seed, dtype=torch.int32),
        "last_token": torch.zeros(num_slots, dtype=torch.int32),
        "seq_len": torch.zeros(num_slots, dtype=torch.int32),
        "num_new": torch.zeros(num, dtype=torch.int32),
    }
    return {name: value.to(at) for name, value in made.items()} | {"max_drafts": max_drafts}


def add_rms_norm_linear(
    problem: Problem, num: int, at: device, seed: Generator, strided: bool
) -> dict[str, Any]:
    """Make x and residual [T, I], norm weight [I], and weight [O, I] and bias [O] as for `linear`."""
    given = add_rms_norm({**problem, "size": problem["in_size"]}, num, at, seed, strided)
    linear_inputs = linear(problem, num, at, seed, strided)
    return {
        "x": given["x"],
        "residual": given["residual"],
        "norm_weight": given["weight"],
        "eps": EPS,
        "weight": linear_inputs["weight"],
        "bias": linear_inputs["bias"],
    }


def add_rms_norm_linear_silu_mul(
    problem: Problem, num: int, at: device, seed: Generator, strided: bool
) -> dict[str, Any]:
    """Like `add_rms_norm_linear`, with weight [2O, I] and bias [2O]."""
    return add_rms_norm_linear(
        {**problem, "out_size": 2 * problem["out_size"]}, num, at, seed, strided
    )


def fused_block(
    problem: Problem, num: int, at: device, seed: Generator, strided: bool
) -> dict[str, Any]:
    """Make x [T, I], residual [T, H], weights of unit gain, and norm weights around 1."""
    heads, hidden, size = problem["in_size"], problem["hidden_size"], problem["intermediate_size"]
    given = add_rms_norm({**problem, "size": hidden}, num, at, seed, strided)

    def weight(outer: int, inner: int) -> Tensor:
        values: Tensor = random((outer, inner), problem, at, seed) / inner**0.5
        return values

    return {
        "x": random_rows(num, heads, problem, at, seed, strided),
        "residual": given["residual"],
        "out": weight(hidden, heads),
        "norm_weight": given["weight"],
        "gate_up": weight(2 * size, hidden),
        "down": weight(hidden, size),
        "next_norm_weight": _norm_weight(hidden, problem, at, seed, strided),
        "qkv": weight(problem["out_size"], hidden),
        "eps": EPS,
    }


def moe_route(
    problem: Problem, num: int, at: device, seed: Generator, strided: bool
) -> dict[str, Any]:
    """Make logits [T, E] with ties in every third row, and a bias [E] if the problem has one.

    Unless strided, the bias has ties too: each expert of the first half and one of the second have equal scores in these
    rows, and so have their groups.
    """
    experts = problem["num_experts"]
    logits = random_rows(num, experts, problem, at, seed, strided)
    logits[::3] = logits[::3].mul_(2).round_() / 2
    bias = torch.randn(experts, generator=seed).to(at) if problem["has_bias"] else None
    if bias is not None and not strided:
        half = experts // 2
        bias[half : 2 * half] = bias[:half]
        logits[::3, half : 2 * half] = logits[::3, :half]
    return {"logits": logits, "bias": bias}


def moe_logits(
    problem: Problem, num: int, at: device, seed: Generator, strided: bool
) -> dict[str, Any]:
    """Make x [T, N] and a float32 weight [E, N] of unit gain."""
    size = problem["hidden_size"]
    weight = torch.randn((problem["num_experts"], size), generator=seed) / size**0.5
    return {"x": random_rows(num, size, problem, at, seed, strided), "weight": weight.to(at)}


def moe_experts(
    problem: Problem, num: int, at: device, seed: Generator, strided: bool
) -> dict[str, Any]:
    """Make x [T, N], weights of unit gain, and distinct experts for each token.

    Some experts get no token, and some tokens have fewer experts than k, or none.
    """
    experts, k = problem["num_experts"], problem["top_k"]
    size, inner = problem["hidden_size"], problem["intermediate_size"]
    ids = torch.rand((num, experts), generator=seed).argsort(dim=1)[:, :k].to(torch.int32)
    ids[2::5, -1] = experts
    ids[4::5] = experts
    return {
        "x": random_rows(num, size, problem, at, seed, strided),
        "gate_up": random((experts, 2 * inner, size), problem, at, seed) / size**0.5,
        "down": random((experts, size, inner), problem, at, seed) / inner**0.5,
        "weights": torch.rand((num, k), generator=seed).to(at),
        "ids": ids.to(at),
    }


def moe_experts_fp8(
    problem: Problem, num: int, at: device, seed: Generator, strided: bool
) -> dict[str, Any]:
    """Like `moe_experts`, with per-channel FP8 weights; magnitudes differ by expert and channel."""
    return quantized_experts(moe_experts(problem, num, at, seed, strided), quantize_rows)


def quantized_experts(
    given: dict[str, Any], quantize: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> dict[str, Any]:
    """Return the inputs of `moe_experts` with weights that `quantize` quantizes per row."""
    made = {"x": given["x"]}
    for name in ("gate_up", "down"):
        gain = torch.linspace(0.7, 1.3, len(given[name]), device=given[name].device)
        weight = given[name] * gain.view(-1, 1, 1)
        weight[:, ::5] *= 0.25
        codes, scale = quantize(weight.flatten(0, 1))
        made |= {name: codes.view(weight.shape), f"{name}_scale": scale.view(*weight.shape[:2], 1)}
    return {**made, "weights": given["weights"], "ids": given["ids"]}


def moe_experts_fp8_block(
    problem: Problem, num: int, at: device, seed: Generator, strided: bool
) -> dict[str, Any]:
    """Like `moe_experts`, with block-wise quantized weights; magnitudes differ by expert and grow along features."""
    given = moe_experts(problem, num, at, seed, strided)
    made = {"x": given["x"]}
    for name in ("gate_up", "down"):
        weight = given[name].to(torch.float32)
        weight *= torch.linspace(0.7, 1.3, weight.shape[0], device=at).view(-1, 1, 1)
        weight *= torch.linspace(0.5, 1.5, weight.shape[2], device=at)
        codes, scales = zip(*map(quantize_blocks, weight), strict=True)
        made |= {name: torch.stack(codes), f"{name}_scale": torch.stack(scales)}
    return {**made, "weights": given["weights"], "ids": given["ids"]}


def quantize_fp8(
    problem: Problem, num: int, at: device, seed: Generator, strided: bool
) -> dict[str, Any]:
    """Make x [T, N] with row magnitudes over three decades; every third row is zero."""
    size = torch.logspace(-2, 1, max(num, 1))[:num] * (torch.arange(num) % 3 != 2)
    x = random_rows(num, problem["size"], problem, at, seed, strided)
    return {"x": x.mul_(size.unsqueeze(1).to(x))}


def linear_fp8(
    problem: Problem, num: int, at: device, seed: Generator, strided: bool
) -> dict[str, Any]:
    """Make x [T, I] and weight [O, I] of unit gain, both quantized per row, and a bias [O] for even T."""
    inner, outer = problem["in_size"], problem["out_size"]
    x, x_scale = quantize_rows(random((num, inner), problem, at, seed))
    weight, weight_scale = quantize_rows(random((outer, inner), problem, at, seed) / inner**0.5)
    if strided:
        x = _within_wider_rows(x)
    bias = _around_one(outer, problem, at, seed) if num % 2 == 0 else None
    return {
        "x": x,
        "x_scale": x_scale,
        "weight": weight,
        "weight_scale": weight_scale,
        "bias": bias,
    }


def quantize_fp8_blocks(
    problem: Problem, num: int, at: device, seed: Generator, strided: bool
) -> dict[str, Any]:
    """Make a weight like x of `quantize_fp8`, with 30 times as many rows, so that some need several blocks."""
    return {"weight": quantize_fp8(problem, 30 * num, at, seed, strided)["x"]}


def linear_fp8_block(
    problem: Problem, num: int, at: device, seed: Generator, strided: bool
) -> dict[str, Any]:
    """Make x [T, I] and weight [O, I] of unit gain, with magnitudes that grow along both axes, and a bias for even T."""
    inner, outer = problem["in_size"], problem["out_size"]
    x, x_scale = quantize_groups(
        random((num, inner), problem, at, seed) * torch.logspace(-1, 0.5, inner, device=at)
    )
    rows = torch.logspace(-1, 0.5, outer, device=at).unsqueeze(1)
    weight, weight_scale = quantize_blocks(
        random((outer, inner), problem, at, seed) * rows / inner**0.5
    )
    if strided:
        x, x_scale = _within_wider_rows(x), _within_wider_rows(x_scale)
    bias = _around_one(outer, problem, at, seed) if num % 2 == 0 else None
    return {
        "x": x,
        "x_scale": x_scale,
        "weight": weight,
        "weight_scale": weight_scale,
        "bias": bias,
    }


def _within_wider_rows(x: Tensor) -> Tensor:
    wide = torch.zeros((x.shape[0], x.shape[1] + 48), dtype=x.dtype, device=x.device)
    cut = wide[:, 16 : 16 + x.shape[1]]
    return cut.copy_(x)


def _around_one(size: int, problem: Problem, at: device, seed: Generator) -> Tensor:
    return 1 + random((size,), problem, at, seed) / 4


def _norm_weight(size: int, problem: Problem, at: device, seed: Generator, strided: bool) -> Tensor:
    """Return a norm weight, in float32 in the strided cases: ops take one in either dtype."""
    return _around_one(size, {**problem, "dtype": "float32"} if strided else problem, at, seed)


def quantize_linear_fp8(
    problem: Problem, num: int, at: device, seed: Generator, strided: bool
) -> dict[str, Any]:
    """Like `linear_fp8`, with x [T, I] not quantized."""
    made = linear_fp8(problem, num, at, seed, strided)
    x = random_rows(num, problem["in_size"], problem, at, seed, strided)
    return {
        "x": x,
        "weight": made["weight"],
        "weight_scale": made["weight_scale"],
        "bias": made["bias"],
    }


def add_rms_norm_linear_fp8(
    problem: Problem, num: int, at: device, seed: Generator, strided: bool
) -> dict[str, Any]:
    """Make x and residual [T, I], norm weight [I], and a weight with scales and bias as for `linear_fp8`."""
    given = add_rms_norm({**problem, "size": problem["in_size"]}, num, at, seed, strided)
    made = quantize_linear_fp8(problem, num, at, seed, strided)
    return {
        "x": given["x"],
        "residual": given["residual"],
        "norm_weight": given["weight"],
        "eps": EPS,
        "weight": made["weight"],
        "weight_scale": made["weight_scale"],
        "bias": made["bias"],
    }


def add_rms_norm_mlp_fp8(
    problem: Problem, num: int, at: device, seed: Generator, strided: bool
) -> dict[str, Any]:
    """Make x and residual [T, N], norm weight [N], and both weights of an MLP with scales and biases."""
    hidden, size = problem["hidden_size"], problem["size"]
    wide = add_rms_norm_linear_fp8(
        {**problem, "in_size": hidden, "out_size": 2 * size}, num, at, seed, strided
    )
    narrow = linear_fp8({**problem, "in_size": size, "out_size": hidden}, num, at, seed, strided)
    return {
        "x": wide["x"],
        "residual": wide["residual"],
        "norm_weight": wide["norm_weight"],
        "eps": EPS,
        "gate_up": wide["weight"],
        "gate_up_scale": wide["weight_scale"],
        "gate_up_bias": wide["bias"],
        "down": narrow["weight"],
        "down_scale": narrow["weight_scale"],
        "down_bias": narrow["bias"],
    }
