"""Conformance of attention backends: generated steps over a poisoned cache, against the definition."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from itertools import pairwise

import torch
from torch import Tensor

from tokenspeed_core.api.attention import (
    AttentionFactory,
    AttentionKernel,
    AttentionLimits,
    AttentionProblem,
)
from tokenspeed_core.api.kernels import KernelSpec
from tokenspeed_core.api.ops import common_ops
from tokenspeed_testing.canaries import with_canaries
from tokenspeed_testing.conformance import labeled
from tokenspeed_testing.fixtures import Fixture, Rows, limits_of, make_fixture, run
from tokenspeed_testing.host_syncs import without_host_syncs
from tokenspeed_testing.replays import replays
from tokenspeed_testing.shapes import kv_dtypes

__all__ = [
    "Rows",
    "Fixture",
    "attend",
    "attends",
    "attends_once",
    "attends_to_steps",
    "attention_problems",
    "check_attention",
    "compare",
    "ignores_other_rows",
    "limits_of",
    "make_fixture",
    "never_synchronizes",
    "run",
    "serves_layers_and_steps",
]

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
    Rows(
        (1,) * 11,
        (400, 325, 340, 700, 321, 333, 322, 350, 399, 321, 0),
        num_shared=320,
        others=(4,),
    ),
)
_MANY_DECODES = Rows((1,) * 20, (70, 9, 41, *range(1, 18)))
_MANY_PROMPTS = Rows((5, 12, 9, 3, 3, 3, 3, 3), (40, 12, 33, 17, 17, 17, 3, 4))
PADDED_ROWS = Rows((1, 1, 1, 1), (33, 90, 0, 0))


def attention_problems(spec: KernelSpec) -> Iterator[AttentionProblem]:
    """Yield declared problems that cover each dtype, head size, block size, grouping and feature."""
    capability = spec.capability
    sizes = capability.head_sizes or (64, 32, 96, 128)
    blocks = capability.block_sizes or (16, 64, 32, 8)
    groups = ((4, 2), (7, 1), (3, 3), (16, 2))
    windows = (None, 20) if "window" in capability.features else (None,)
    chunks = (False, False, False, True) if "chunked" in capability.features else (False,)
    caps = (None, 1.0, 1.0, None) if "soft_cap" in capability.features else (None,)
    sinks = (False, False, True, True) if "sinks" in capability.features else (False,)
    values = (None, 48, None, 24) if "value_head_size" in capability.features else (None,)
    whole = (False, True, True, False) if "bidirectional" in capability.features else (False,)
    for phase in capability.phases or ("prefill", "decode"):
        for index in range(
            max(
                map(
                    len,
                    (
                        sizes,
                        blocks,
                        groups,
                        capability.dtypes,
                        windows,
                        chunks,
                        caps,
                        sinks,
                        values,
                        whole,
                    ),
                )
            )
        ):
            num_heads, num_kv_heads = groups[index % len(groups)]
            dtype = capability.dtypes[index % len(capability.dtypes)]
            size = sizes[index % len(sizes)]
            for kv_dtype in kv_dtypes(spec, dtype):
                yield AttentionProblem(
                    phase=phase,
                    num_heads=num_heads,
                    num_kv_heads=num_kv_heads,
                    head_size=size,
                    dtype=dtype,
                    kv_dtype=kv_dtype,
                    block_size=blocks[index % len(blocks)],
                    scale=size**-0.5,
                    window=windows[index % len(windows)],
                    soft_cap=caps[index % len(caps)],
                    has_sinks=sinks[index % len(sinks)],
                    is_chunked=chunks[index % len(chunks)],
                    value_head_size=values[index % len(values)],
                    is_bidirectional=whole[index % len(whole)],
                )


def check_attention(
    spec: KernelSpec, device: torch.device, *, cases: Iterable[AttentionProblem] | None = None
) -> int:
    """Run a backend on steps of every kind and return their number. Raises AssertionError naming the case.

    On a GPU, CUDA graph replays run too if the backend declares graph_safe; they are not counted.
    """
    factory: AttentionFactory = spec.factory()
    runs = 0
    for problem in attention_problems(spec) if cases is None else cases:
        runs += attends_to_steps(factory, problem, device)
        serves_layers_and_steps(factory, problem, device)
        if "graph_safe" in spec.capability.features and device.type == "cuda":
            replays(spec, problem, device)
    return runs


def attends_to_steps(
    factory: AttentionFactory, problem: AttentionProblem, device: torch.device
) -> int:
    """Compare a backend with the definition on a step of every kind. Returns the number of steps."""
    kinds = (*_kinds(problem), PADDED_ROWS)
    for index, rows in enumerate(kinds):
        fixture = make_fixture(problem, rows, device, seed=index)
        kernel = factory(problem, limits_of(fixture), device)
        attends(kernel, problem, fixture, rows)
        if index == 0:  # the host has no exact lengths for this step
            step = replace(fixture.step, host_query_start=None, host_seq_lens=None)
            attends(kernel, problem, replace(fixture, step=step), rows)
    return len(kinds)


def _kinds(problem: AttentionProblem) -> tuple[Rows, ...]:
    return DECODE_ROWS if problem.phase == "decode" else PREFILL_ROWS


def attends(
    kernel: AttentionKernel, problem: AttentionProblem, fixture: Fixture, rows: Rows
) -> None:
    """Compare a backend with the definition on a step, with a poisoned output and guarded inputs."""
    given, canaries = with_canaries(
        {
            "q": fixture.q,
            "k_cache": fixture.k_cache,
            "v_cache": fixture.v_cache,
            "out": _unwritten(fixture),
            "sinks": fixture.sinks,
            **{
                name: getattr(fixture.step, name)
                for name in ("query_start", "seq_lens", "block_table")
            },
        }
    )
    found = given.pop("out")
    moved = {name: given.pop(name) for name in ("q", "k_cache", "v_cache", "sinks")}
    kernel.prepare(replace(fixture.step, **given))
    run(kernel, replace(fixture, **moved), found)
    for canary in canaries:
        canary.check(f"{problem}, {rows}", ("out",))
    num_real = sum(n for n, length in zip(rows.num_queries, rows.seq_lens, strict=True) if length)
    assert not found[: sum(rows.num_queries)].isnan().any(), (
        f"{problem}, {rows}: NaN, or unwritten rows"
    )
    compare(f"{problem}, {rows}", problem, found[:num_real], fixture.expected[:num_real])


def serves_layers_and_steps(
    factory: AttentionFactory, problem: AttentionProblem, device: torch.device
) -> None:
    """Run several steps of two layers each on one backend, and compare with a new backend per layer.

    The second layer has the first layer's queries and sinks in reverse order.
    """
    fixtures = [
        make_fixture(problem, rows, device, seed=seed)
        for seed, rows in enumerate(_kinds(problem)[1:3])
    ]
    limits = AttentionLimits(
        **{
            each.name: max(getattr(limits_of(fixture), each.name) for fixture in fixtures)
            for each in fields(AttentionLimits)
        }
    )
    kernel = factory(problem, limits, device)
    steps = []
    for fixture in fixtures:
        sinks = None if fixture.sinks is None else fixture.sinks.flip(0)
        layers = (fixture, replace(fixture, q=fixture.q.flip(0), sinks=sinks))
        steps.append(
            [(layer, attend(factory(problem, limits_of(layer), device), layer)) for layer in layers]
        )
    for step in (*steps, steps[0]):
        kernel.prepare(step[0][0].step)
        found = [_unwritten(layer) for layer, _ in step]
        for out, (layer, _) in zip(found, step, strict=True):
            run(kernel, layer, out)
        for out, (_, alone) in zip(found, step, strict=True):
            compare(f"{problem}: interleaved layers and steps", problem, out, alone)


def attend(kernel: AttentionKernel, fixture: Fixture) -> Tensor:
    """Prepare and run one layer into an output of NaN; return the output."""
    out = _unwritten(fixture)
    kernel.prepare(fixture.step)
    run(kernel, fixture, out)
    return out


def attends_once(
    factory: AttentionFactory, problem: AttentionProblem, device: torch.device, rows: Rows
) -> None:
    """Build a backend for a problem and compare one step with the definition."""
    fixture = make_fixture(problem, rows, device, seed=0)
    attends(factory(problem, limits_of(fixture), device), problem, fixture, rows)


def ignores_other_rows(
    factory: AttentionFactory, problem: AttentionProblem, device: torch.device
) -> None:
    """Check that rows have the same bits alone, among others, and in a second run."""
    rows = _MANY_DECODES if problem.phase == "decode" else _MANY_PROMPTS
    fixture = make_fixture(problem, rows, device, seed=0)
    step = fixture.step
    kernel = factory(problem, limits_of(fixture), device)
    together, again = attend(kernel, fixture), attend(kernel, fixture)
    assert torch.equal(together, again), (
        f"{problem}: a second run of the same step gave different bits"
    )
    edges = tuple(pairwise(step.host_query_start or ()))
    for row in (0, 1, len(edges) - 1):
        first, last = edges[row]
        num, length = last - first, rows.seq_lens[row]
        alone = replace(
            step,
            num_rows=1,
            num_tokens=num,
            max_num_query=num,
            max_seq_len=length,
            query_start=step.query_start[row : row + 2] - first,
            seq_lens=step.seq_lens[row : row + 1],
            block_table=step.block_table[row : row + 1],
            host_query_start=(0, num),
            host_seq_lens=(length,),
        )
        single = attend(kernel, replace(fixture, step=alone, q=fixture.q[first:last]))
        assert torch.equal(together[first:last], single), f"{problem}: a row depends on the others"


def never_synchronizes(
    factory: AttentionFactory, problem: AttentionProblem, device: torch.device
) -> None:
    """Check on the CPU that `forward` does nothing that would synchronize with a device."""
    rows = DECODE_ROWS[2] if problem.phase == "decode" else PREFILL_ROWS[1]
    fixture = make_fixture(problem, rows, device, seed=0)
    kernel = factory(problem, limits_of(fixture), device)
    kernel.prepare(fixture.step)
    with without_host_syncs(str(problem)):
        run(kernel, fixture, _unwritten(fixture))


def _unwritten(fixture: Fixture) -> Tensor:
    q, out_size = fixture.q, fixture.v_cache.shape[3]
    return q.new_full((*q.shape[:2], out_size), float("nan"))


def compare(case: str, problem: AttentionProblem, found: Tensor, expected: Tensor) -> None:
    """Raise AssertionError naming the case where two outputs differ by more than the tolerance."""
    tolerance = common_ops()["attention"].tolerance(problem.dtype)
    torch.testing.assert_close(
        found.float(),
        expected.float(),
        rtol=tolerance.relative,
        atol=tolerance.absolute,
        msg=labeled(case),
    )
