"""The conformance of attention backends: generated steps over a poisoned arena, against the formula itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from tokenspeed_core.kernels.attention import (
    AttentionFactory,
    AttentionKernel,
    AttentionLimits,
    AttentionProblem,
    AttentionStep,
)
from tokenspeed_core.kernels.ops import common_ops
from tokenspeed_core.kernels.spec import KernelSpec
from tokenspeed_core.testing.conformance import labelled
from tokenspeed_core.testing.shapes import kv_dtypes

NUM_LAYERS = 2  # of the arena: a block holds all layers, so caches are strided


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a step: query tokens and tokens in the cache afterwards, decodes first.

    The blocks that `num_shared` tokens fill are the same in all rows.
    """

    num_queries: tuple[int, ...]
    seq_lens: tuple[int, ...]
    num_shared: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Scene:
    """A step with its tensors, and what attention over it should be (float32 [T, H, D])."""

    step: AttentionStep
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    expected: Tensor


PREFILL_ROWS = (
    Rows((9,), (9,)),
    Rows((5, 1, 30), (40, 1, 30)),
    Rows((1, 1, 1, 17, 33), (64, 1, 37, 50, 33)),
    Rows((1, 1), (130, 7)),
    Rows((70, 3), (200, 3)),
)
DECODE_ROWS = (
    Rows((1,), (1,)),
    Rows((1,), (300,)),
    Rows((1, 1, 1, 1, 1), (64, 16, 17, 1, 145)),
    Rows((3, 3), (50, 3)),
    Rows((1,) * 11, (400, 325, 340, 700, 321, 333, 322, 350, 399, 321, 0), num_shared=320),
)
PADDED_ROWS = Rows((1, 1, 1, 1), (33, 90, 0, 0))


def attention_problems(spec: KernelSpec) -> Iterator[AttentionProblem]:
    """Yield declared problems: each dtype, head size, block size, grouping and window with some of the others."""
    capability = spec.capability
    sizes = capability.head_sizes or (64, 32, 96, 128)
    blocks = capability.block_sizes or (16, 64, 32, 8)
    groups = ((4, 2), (7, 1), (3, 3), (16, 2))
    windows = (None, 20) if "window" in capability.features else (None,)
    for phase in capability.phases or ("prefill", "decode"):
        for index in range(max(len(sizes), len(blocks), len(groups), len(capability.dtypes), len(windows))):
            num_heads, num_kv_heads = groups[index % len(groups)]
            dtype = capability.dtypes[index % len(capability.dtypes)]
            size = sizes[index % len(sizes)]
            for kv_dtype in kv_dtypes(spec, dtype):
                yield AttentionProblem(
                    phase=phase, num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=size,
                    dtype=dtype, kv_dtype=kv_dtype, block_size=blocks[index % len(blocks)], scale=size**-0.5,
                    window=windows[index % len(windows)],
                )


def check_attention(
    spec: KernelSpec, device: torch.device, *, cases: Iterable[AttentionProblem] | None = None
) -> int:
    """Run a backend over steps of every kind and return their number. Raises AssertionError naming the case."""
    factory: AttentionFactory = spec.factory()
    runs = 0
    for problem in attention_problems(spec) if cases is None else cases:
        kinds = DECODE_ROWS if problem.phase == "decode" else PREFILL_ROWS
        for index, rows in enumerate((*kinds, PADDED_ROWS)):
            scene = make_scene(problem, rows, device, seed=index)
            kernel = factory(problem, limits_of(scene), device)
            attends(kernel, problem, scene, rows)
            if index == 0:  # a step whose lengths the host does not know exactly
                step = replace(scene.step, host_query_start=None, host_seq_lens=None)
                attends(kernel, problem, replace(scene, step=step), rows)
            runs += 1
        if problem.phase == "decode" and device.type == "cuda" and "graph_safe" in spec.capability.features:
            replays(factory, problem, device)
    return runs


def attends(kernel: AttentionKernel, problem: AttentionProblem, scene: Scene, rows: Rows) -> None:
    """Compare a backend with the formula on a scene, its output poisoned before."""
    found = attend(kernel, scene)
    tolerance = common_ops()["attention"].tolerance(problem.dtype)
    num_real = sum(n for n, length in zip(rows.num_queries, rows.seq_lens, strict=True) if length)
    assert not found[: sum(rows.num_queries)].isnan().any(), f"{problem}, {rows}: NaN, or unwritten rows"
    torch.testing.assert_close(
        found[:num_real].to(torch.float32), scene.expected[:num_real],
        rtol=tolerance.relative, atol=tolerance.absolute, msg=labelled(f"{problem}, {rows}"),
    )


def attend(kernel: AttentionKernel, scene: Scene) -> Tensor:
    """Prepare and run one layer over a scene, into NaN; return the output."""
    out = torch.full_like(scene.q, float("nan"), memory_format=torch.contiguous_format)
    kernel.prepare(scene.step)
    kernel.forward(scene.q, scene.k_cache, scene.v_cache, out)
    return out


def attends_once(factory: AttentionFactory, problem: AttentionProblem, device: torch.device, rows: Rows) -> None:
    """Build a backend for a problem and compare one step with the formula."""
    scene = make_scene(problem, rows, device, seed=0)
    attends(factory(problem, limits_of(scene), device), problem, scene, rows)


def ignores_other_rows(factory: AttentionFactory, problem: AttentionProblem, device: torch.device) -> None:
    """Compare the bits of a step's last row with those that it has alone, and with those of a second run."""
    rows = Rows((1, 1, 1), (70, 9, 41)) if problem.phase == "decode" else Rows((5, 12, 9), (40, 12, 33))
    scene = make_scene(problem, rows, device, seed=0)
    step, num = scene.step, rows.num_queries[-1]
    alone = replace(
        step, num_rows=1, num_tokens=num, max_num_query=num, max_seq_len=rows.seq_lens[-1],
        query_start=step.query_start[-2:] - step.query_start[-2], seq_lens=step.seq_lens[-1:],
        block_table=step.block_table[-1:], host_query_start=(0, num), host_seq_lens=rows.seq_lens[-1:],
    )
    kernel = factory(problem, limits_of(scene), device)
    together, again = attend(kernel, scene)[-num:], attend(kernel, scene)[-num:]
    single = attend(kernel, replace(scene, step=alone, q=scene.q[-num:]))
    assert torch.equal(together, again), f"{problem}: the same step gave other bits the second time"
    assert torch.equal(together, single), f"{problem}: a row depends on the others"


def replays(factory: AttentionFactory, problem: AttentionProblem, device: torch.device) -> None:
    """Capture decode steps in CUDA graphs and replay them on sequences of other lengths in other blocks."""
    queries, others = (1,) * 11, (700, 650, 680, 650, 690, 650)
    alone = Rows(queries, (200, 90, 70, 610, *others, 0))
    together = Rows(queries, (900, 650, 720, 641, *others, 0), num_shared=640)
    briefly = Rows(queries, (500, 399, 720, 641, *others, 410), num_shared=384)
    replay(factory, problem, device, Rows((1, 1, 1), (20, 3, 40)), Rows((1, 1, 1), (200, 90, 0)))
    for first, second in ((alone, together), (together, alone), (together, briefly)):
        replay(factory, problem, device, first, second)


def replay(
    factory: AttentionFactory, problem: AttentionProblem, device: torch.device, captured: Rows, replayed: Rows
) -> None:
    """Capture a decode step of some rows in a CUDA graph and replay it on others."""
    longest = max(256, *captured.seq_lens, *replayed.seq_lens)
    first = make_scene(problem, captured, device, seed=1, max_len=longest)
    second = make_scene(problem, replayed, device, seed=2, max_len=longest)
    kernel = factory(problem, limits_of(first), device)
    attend(kernel, first)
    bounds = replace(first.step, max_seq_len=longest, host_query_start=None, host_seq_lens=None)
    out = torch.full_like(first.q, float("nan"), memory_format=torch.contiguous_format)
    kernel.prepare(bounds)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.forward(first.q, first.k_cache, first.v_cache, out)
    for name in ("query_start", "seq_lens", "block_table"):
        getattr(first.step, name).copy_(getattr(second.step, name))
    first.q.copy_(second.q)
    first.k_cache.copy_(second.k_cache)
    first.v_cache.copy_(second.v_cache)
    kernel.prepare(bounds)
    graph.replay()
    num_real = sum(length > 0 for length in replayed.seq_lens)
    tolerance = common_ops()["attention"].tolerance(problem.dtype)
    assert not out.isnan().any(), f"{problem}: a replayed graph leaves NaN in a padding row"
    torch.testing.assert_close(
        out[:num_real].to(torch.float32), second.expected[:num_real], rtol=tolerance.relative, atol=tolerance.absolute,
        msg=labelled(f"{problem}: a replayed graph"),
    )


def make_scene(
    problem: AttentionProblem, rows: Rows, device: torch.device, *, seed: int, max_len: int | None = None
) -> Scene:
    """Build a step whose blocks are scattered; memory that no step wrote is NaN, table entries past a row -1."""
    generator = torch.Generator().manual_seed(seed)
    size, num_rows = problem.block_size, len(rows.seq_lens)
    longest = max(rows.seq_lens) if max_len is None else max_len
    num_blocks = -(-longest // size) + 1
    dtype, kv_dtype = getattr(torch, problem.dtype), getattr(torch, problem.kv_dtype)
    pool = num_rows * num_blocks + 1
    arena = torch.full(
        (pool, NUM_LAYERS, 2, size, problem.num_kv_heads, problem.head_size), float("nan"), dtype=kv_dtype
    )
    table = torch.full((num_rows, num_blocks), -1, dtype=torch.int32)
    order = iter(torch.randperm(pool, generator=generator).tolist())
    for row, length in enumerate(rows.seq_lens):
        for index, first in enumerate(range(0, length, size)):
            if row and first + size <= rows.num_shared:
                table[row, index] = table[0, index]
                continue
            table[row, index] = block = next(order)
            filled = arena[block, NUM_LAYERS - 1, :, : min(size, length - first)]
            filled.copy_(torch.randn(filled.shape, generator=generator))
    starts = (0, *accumulate(rows.num_queries))
    # q is cut from a wider tensor, as a projection of q, k and v together gives it
    wide = torch.randn(
        (starts[-1], problem.num_heads + 2 * problem.num_kv_heads, problem.head_size), generator=generator
    ).to(dtype)
    wide_arena = arena.float()  # torch indexes no eight-bit floats
    caches = wide_arena[:, NUM_LAYERS - 1, 0], wide_arena[:, NUM_LAYERS - 1, 1]
    expected = formula(wide[:, : problem.num_heads], *caches, starts, rows.seq_lens, table, problem)
    moved = arena.to(device)
    step = AttentionStep(
        num_rows=num_rows, num_tokens=starts[-1], max_num_query=max(rows.num_queries), max_seq_len=longest,
        query_start=torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(rows.seq_lens, dtype=torch.int32, device=device),
        block_table=table.to(device), host_query_start=starts, host_seq_lens=rows.seq_lens,
    )
    return Scene(
        step, wide.to(device)[:, : problem.num_heads], moved[:, NUM_LAYERS - 1, 0],
        moved[:, NUM_LAYERS - 1, 1], expected.to(device),
    )


def limits_of(scene: Scene) -> AttentionLimits:
    """Return limits that just hold a scene."""
    num_blocks = scene.step.block_table.shape[1]
    return AttentionLimits(
        max_num_rows=scene.step.num_rows, max_num_tokens=scene.step.num_tokens,
        max_model_len=num_blocks * scene.k_cache.shape[1], max_num_blocks=num_blocks,
    )


def formula(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, starts: Iterable[int], seq_lens: tuple[int, ...], table: Tensor,
    problem: AttentionProblem,
) -> Tensor:
    """Attend token by token in float32, as the definition has it; rows of length 0 are left NaN."""
    out = torch.full(q.shape, float("nan"))
    num_groups = problem.num_heads // problem.num_kv_heads
    for row, (start, stop) in enumerate(pairwise(starts)):
        if seq_lens[row] == 0:
            continue
        for token in range(start, stop):
            position = seq_lens[row] - stop + token
            first = 0 if problem.window is None else max(0, position - problem.window + 1)
            key = torch.arange(first, position + 1)
            blocks, offsets = table[row, key // problem.block_size].long(), key % problem.block_size
            k = k_cache[blocks, offsets].float().repeat_interleave(num_groups, dim=1)
            v = v_cache[blocks, offsets].float().repeat_interleave(num_groups, dim=1)
            scores = torch.einsum("hd,lhd->hl", q[token].float(), k) * problem.scale
            out[token] = torch.einsum("hl,lhd->hd", scores.softmax(dim=-1), v)
    return out
