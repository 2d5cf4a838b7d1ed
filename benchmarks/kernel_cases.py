# mypy: allow-untyped-calls
"""Cases of the kernel benchmarks: shapes of real models, with the bytes and operations of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from tokenspeed_core.api.attention import AttentionLimits, AttentionProblem, AttentionStep
from tokenspeed_core.api.kernels import KernelSpec
from tokenspeed_core.api.ops import prepare_weights
from tokenspeed_kernels.reference.fp8 import quantize_rows
from tokenspeed_kernels.reference.fp8_block import quantize_blocks

BF16 = 2  # bytes
H, K, D, N, INNER, V = 32, 8, 128, 4096, 12288, 151936  # qwen3-8b
E, TOP_K, MOE_N, MOE_I = 128, 8, 2048, 768  # qwen3-30b-a3b
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement. `bind(spec)` returns a call without arguments that computes and returns a tensor.

    `num_bytes`: bytes that must be moved, with each input read and each output written once. `num_flops`: operations
    of the matrix products.
    """

    op: str
    name: str
    bind: Callable[[KernelSpec], Callable[[], Tensor]]
    num_bytes: float
    num_flops: float = 0.0


def cases(device: torch.device) -> Iterator[Case]:
    """Yield all cases. Inputs are made lazily, case by case."""
    yield from attention_cases(device)
    for num in (64, 8192):
        yield from _rows(device, num)
    for num in (64, 256):
        yield from _sampling(device, num)
    for num in (1, 64, 256, 1024, 8192):
        yield from _experts(device, num)


def attention_step(
    num_queries: list[int],
    seq_lens: list[int],
    device: torch.device,
    *,
    max_model_len: int = 0,
    num_shared: int = 0,
    block_size: int = BLOCK_SIZE,
) -> tuple[AttentionStep, int]:
    """Return a step with scattered blocks, and the number of blocks in its pool.

    With a `max_model_len` the step is like a captured one: no host-side lengths, and a block table for that many
    tokens. All rows share their first `num_shared` keys.
    """
    counts = [-(-length // block_size) for length in seq_lens]
    table = torch.zeros(
        (len(seq_lens), max(*counts, -(-max_model_len // block_size))), dtype=torch.int32
    )
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    for row, blocks in enumerate(order.split(counts)):
        table[row, : len(blocks)] = blocks
    table[:, : num_shared // block_size] = table[0, : num_shared // block_size]
    starts = (0, *accumulate(num_queries))
    step = AttentionStep(
        num_rows=len(seq_lens),
        num_tokens=starts[-1],
        max_num_query=max(num_queries),
        max_seq_len=max(*seq_lens, max_model_len),
        query_start=torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        block_table=table.to(device),
        host_query_start=None if max_model_len else starts,
        host_seq_lens=None if max_model_len else tuple(seq_lens),
    )
    return step, sum(counts)


def attention_problem(phase: str) -> AttentionProblem:
    """Return the attention problem of qwen3-8b."""
    return AttentionProblem(phase, H, K, D, "bfloat16", "bfloat16", BLOCK_SIZE, D**-0.5, None)


def attention_case(
    name: str,
    num_queries: list[int],
    seq_lens: list[int],
    device: torch.device,
    *,
    max_model_len: int = 0,
    num_shared: int = 0,
) -> Case:
    """Return an attention case of qwen3-8b. Operations exclude the masked half of causal products.

    A `max_model_len` beyond the rows' lengths shows the cost of a captured step, which must be ready for longer rows.
    """
    phase = "decode" if max(num_queries) == 1 else "prefill"
    problem = attention_problem(phase)
    seen = sum(
        n * length - n * (n - 1) / 2 for n, length in zip(num_queries, seq_lens, strict=True)
    )
    num_keys = sum(seq_lens) - num_shared * (len(seq_lens) - 1)
    num_bytes = 2 * num_keys * K * D * BF16 + 2 * sum(num_queries) * H * D * BF16

    def bind(spec: KernelSpec) -> Callable[[], Tensor]:
        step, num_blocks = attention_step(
            num_queries, seq_lens, device, max_model_len=max_model_len, num_shared=num_shared
        )
        arena = torch.randn((num_blocks, 2, BLOCK_SIZE, K, D), dtype=torch.bfloat16, device=device)
        q = torch.randn((step.num_tokens, H, D), dtype=torch.bfloat16, device=device)
        out = torch.empty_like(q)
        limits = AttentionLimits(
            step.num_rows, step.num_tokens, step.max_seq_len, step.block_table.shape[1]
        )
        kernel = spec.factory()(problem, limits, device)
        kernel.prepare(step)

        def attend() -> Tensor:
            kernel.forward(q, arena[:, 0], arena[:, 1], out)
            return out

        return attend

    return Case("attention", name, bind, num_bytes, 4 * D * H * seen)


def attention_cases(device: torch.device, *, max_model_len: int = 0) -> Iterator[Case]:
    """Yield the attention cases; with a `max_model_len`, as captured steps. Names begin with the phase."""

    def case(
        name: str,
        num_queries: list[int],
        seq_lens: list[int],
        longest: int = max_model_len,
        *,
        num_shared: int = 0,
    ) -> Case:
        return attention_case(
            name, num_queries, seq_lens, device, max_model_len=longest, num_shared=num_shared
        )

    yield case("decode 64 x 2048", [1] * 64, [2048] * 64)
    if not max_model_len:
        yield case("decode 64 x 2048 of 40960", [1] * 64, [2048] * 64, 40960)
    yield case("decode 32 x 6144", [1] * 32, [6144] * 32)
    yield case("decode 32 x 6144, 4096 shared", [1] * 32, [6144] * 32, num_shared=4096)
    yield case("decode 256 x 640", [1] * 256, [640] * 256)
    yield case("decode 1 x 32768", [1], [32768])
    yield case("decode 16, 128 to 16384", [1] * 16, [128] * 8 + [16384] * 8)
    yield case("decode 60 x 512, 4 x 32768", [1] * 64, [512] * 60 + [32768] * 4)
    yield case("prefill 8 x 4096", [4096] * 8, [4096] * 8)
    yield case("prefill 2048 after 14336", [2048], [16384])
    yield case("prefill 32 x 200 after 4500", [200] * 32, [4700] * 32)
    yield case("mixed 63 x 2048 + 2048", [1] * 63 + [2048], [2048] * 64)


def few_attention_cases(device: torch.device, *, max_model_len: int) -> Iterator[Case]:
    """Yield a few attention cases as captured steps."""
    for num, length, num_shared in (
        (64, 320, 0),
        (256, 640, 0),
        (64, 2048, 0),
        (1, 8192, 0),
        (32, 6144, 4096),
    ):
        name = f"decode {num} x {length}" + (f", {num_shared} shared" if num_shared else "")
        yield attention_case(
            name,
            [1] * num,
            [length] * num,
            device,
            max_model_len=max_model_len,
            num_shared=num_shared,
        )
    yield attention_case(
        "prefill 8 x 4096", [4096] * 8, [4096] * 8, device, max_model_len=max_model_len
    )


def _case(
    op: str,
    name: str,
    problem: dict[str, Any],
    arguments: list[Any],
    num_bytes: float,
    num_flops: float = 0.0,
    weights: slice = slice(0),
) -> Case:
    def bind(spec: KernelSpec) -> Callable[[], Tensor]:
        kernel = spec.factory()({**problem, "dtype": problem.get("dtype", "bfloat16")})
        given = list(arguments)
        if hasattr(kernel, "prepare_weights"):
            given[weights] = [each.clone() for each in given[weights]]
            prepare_weights(kernel, *given[weights])

        def call() -> Tensor:
            result = kernel(*given)
            if isinstance(result, tuple):
                return torch.as_tensor(result[0])
            return torch.as_tensor(arguments[0] if result is None else result)

        return call

    return Case(op, name, bind, num_bytes, num_flops)


def _rows(device: torch.device, num: int) -> Iterator[Case]:
    def rand(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=device)

    x, weight = rand(num, N), rand(N)
    yield _case("rms_norm", f"{num} x {N}", {"size": N}, [x, weight, 1e-6], 2 * num * N * BF16)
    residual = rand(num, N)
    yield _case(
        "add_rms_norm",
        f"{num} x {N}",
        {"size": N},
        [x * 1e-3, residual, weight, 1e-6],
        4 * num * N * BF16,
    )
    qkv = rand(num, H + 2 * K, D)
    q, k, v = qkv[:, :H], qkv[:, H : H + K], qkv[:, H + K :]
    positions = torch.arange(num, device=device)
    angles = torch.arange(num, device=device)[:, None] / 10000 ** (
        torch.arange(D // 2, device=device) / D * 2
    )
    table = torch.cat([angles.cos(), angles.sin()], dim=1)
    heads = {"num_heads": H, "num_kv_heads": K, "head_size": D, "rotary_size": D}
    moved = num * (2 * (H + K) * D * BF16 + D * 4)
    yield _case("rope", f"{num} x {H}+{K}", heads, [q, k, positions, table, False], moved)
    norms = [rand(D), rand(D), 1e-6]
    yield _case(
        "qk_norm_rope", f"{num} x {H}+{K}", heads, [q, k, *norms, positions, table, False], moved
    )
    yield _case(
        "silu_mul",
        f"{num} x {INNER}",
        {"size": INNER},
        [rand(num, 2 * INNER)],
        3 * num * INNER * BF16,
    )
    arena = torch.zeros(
        (num // BLOCK_SIZE + 1, 2, BLOCK_SIZE, K, D), dtype=torch.bfloat16, device=device
    )
    slots = torch.randperm(num, device=device)
    cache = {"num_kv_heads": K, "block_size": BLOCK_SIZE, "kv_dtype": "bfloat16"}
    place = [q, k, v, arena[:, 0], arena[:, 1], slots]
    both = {**heads, **cache}
    placed = num * ((2 * H + 4 * K) * D * BF16 + D * 4)
    yield _case(
        "rope_write_kv", f"{num} x {H}+{K}", both, [*place, positions, table, False], placed
    )
    yield _case(
        "qk_norm_rope_write_kv",
        f"{num} x {H}+{K}",
        both,
        [*place, *norms, positions, table, False],
        placed,
    )
    yield _case(
        "write_kv",
        f"{num}",
        {**cache, "head_size": D, "value_head_size": None},
        [k, v, arena[:, 0], arena[:, 1], slots],
        4 * num * K * D * BF16,
    )


def _sampling(device: torch.device, num: int) -> Iterator[Case]:
    logits = torch.randn((num, V), device=device) * 2
    problem = {"vocab_size": V}
    narrow = logits.to(torch.bfloat16)
    yield _case("greedy", f"{num} x {V}", problem, [narrow], num * V * BF16)

    rank = torch.rand((num, V), device=device).argsort(dim=1) + 1
    peaked = -1.2 * rank.log() + torch.randn((num, V), device=device) / 4

    def filters(top_k: int, top_p: float, of: Tensor = logits) -> list[Tensor]:
        columns = (
            (0.7, torch.float32),
            (top_k, torch.int32),
            (top_p, torch.float32),
            (0.0, torch.float32),
        )
        filled = [torch.full((num,), value, dtype=dtype, device=device) for value, dtype in columns]
        seeds = torch.arange(num, device=device)
        return [of, *filled, seeds, seeds]

    wide = {**problem, "dtype": "float32"}
    yield _case("sample", f"{num} x {V} flat", wide, filters(0, 1.0), num * V * 4)
    yield _case("sample", f"{num} x {V} peaked", wide, filters(0, 1.0, peaked), num * V * 4)
    yield _case("sample", f"{num} x {V} peaked p=.9", wide, filters(0, 0.9, peaked), num * V * 4)
    yield _case("sample", f"{num} x {V} k=50", wide, filters(50, 1.0), num * V * 4)
    yield _case("sample", f"{num} x {V} k=50 p=.9", wide, filters(50, 0.9), num * V * 4)


def _experts(device: torch.device, num: int) -> Iterator[Case]:
    def rand(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=device) * float(shape[-1] ** -0.5)

    problem = {"num_experts": E, "top_k": TOP_K, "hidden_size": MOE_N, "intermediate_size": MOE_I}
    logits = rand(num, E)
    routing = {
        "num_experts": E,
        "top_k": TOP_K,
        "score": "softmax",
        "renormalize": True,
        "scale": 1.0,
        "num_groups": 1,
        "top_groups": 1,
        "group_score": "max",
        "has_bias": False,
    }
    yield _case("moe_route", f"{num} x {E}", routing, [logits, None], num * (E * BF16 + TOP_K * 8))
    x, weight = rand(num, MOE_N), rand(E, MOE_N).float()
    sizes = {"num_experts": E, "hidden_size": MOE_N}
    yield _case(
        "moe_logits",
        f"{num} x {E}",
        sizes,
        [x, weight],
        weight.nbytes + x.nbytes + num * E * 4,
        2 * num * E * MOE_N,
    )
    ids = torch.rand((num, E), device=device).argsort(dim=1)[:, :TOP_K].to(torch.int32)
    weights = torch.full((num, TOP_K), 1 / TOP_K, device=device)
    arguments = [rand(num, MOE_N), rand(E, 2 * MOE_I, MOE_N), rand(E, MOE_N, MOE_I), weights, ids]
    used = E * (1 - (1 - TOP_K / E) ** num)
    yield _case(
        "moe_experts",
        f"{num} tokens",
        problem,
        arguments,
        used * 3 * MOE_N * MOE_I * BF16 + 2 * num * MOE_N * BF16,
        6 * num * TOP_K * MOE_N * MOE_I,
        weights=slice(1, 3),
    )
    x, gate_up, down, *_ = arguments
    packed = [part for weight in (gate_up, down) for part in _by_rows(weight)]
    yield _case(
        "moe_experts_fp8",
        f"{num} tokens",
        problem,
        [x, *packed, weights, ids],
        used * 3 * MOE_N * MOE_I + 2 * num * MOE_N * BF16,
        6 * num * TOP_K * MOE_N * MOE_I,
    )

    yield _case(
        "moe_experts_fp8_block",
        f"{num} tokens",
        problem,
        [x, *(part for weight in (gate_up, down) for part in _by_blocks(weight)), weights, ids],
        used * 3 * MOE_N * MOE_I + 2 * num * MOE_N * BF16,
        6 * num * TOP_K * MOE_N * MOE_I,
    )


def _by_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return expert weights [E, O, I] in e4m3 with block-wise scales."""
    codes, scales = zip(*map(quantize_blocks, weight), strict=True)
    return torch.stack(codes), torch.stack(scales)


def _by_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return expert weights [E, O, I] in e4m3 with per-channel scales."""
    codes, scale = quantize_rows(weight.flatten(0, 1))
    return codes.view(weight.shape), scale.view(*weight.shape[:2], 1)
