"""CUDA graph replay of attention backends, with the sizes and padding that the worker uses.

A step of each size is captured while all its rows are padding, and replayed with rows of other
lengths in other blocks. The sizes share a backend. In a mixed step, decodes and prompts have
separate kernels. On a CPU each replay is a plain call with the same buffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from tokenspeed_core.api.attention import AttentionKernel, AttentionProblem, AttentionStep
from tokenspeed_core.api.kernels import KernelSpec
from tokenspeed_core.api.ops import common_ops
from tokenspeed_core.kernels.refusals import problem_refusals
from tokenspeed_core.worker.staged import BucketSize
from tokenspeed_testing.conformance import labeled
from tokenspeed_testing.fixtures import Fixture, Rows, limits_of, make_fixture, run

MANY_ROWS, FEW_ROWS = BucketSize(11, 0, 0), BucketSize(4, 0, 0)
MIXED, PROMPTS = BucketSize(10, 4, 48), BucketSize(0, 3, 16)
PLAIN, PLAIN_MIXED = (
    replace(MANY_ROWS, no_shared_prefix=True),
    replace(MIXED, no_shared_prefix=True),
)
NUM_CALLS = 2  # of layers in a step, for which the backend prepares once


@dataclass(frozen=True, slots=True)
class Replay:
    """The rows of one replay, without padding.

    `decodes` are lengths; `chunks` are (query tokens, length). The blocks of the first `num_shared`
    tokens are the same in all rows but `others`.
    """

    size: BucketSize
    decodes: tuple[int, ...] = ()
    chunks: tuple[tuple[int, int], ...] = ()
    num_shared: int = 0
    others: tuple[int, ...] = ()

    def rows(self) -> Rows:
        """Return the rows with padding: decodes without keys, and chunks without tokens."""
        num_decodes, num_chunks = self.size.num_decodes, self.size.num_chunks
        chunks = (*self.chunks, *((0, 0),) * (num_chunks - len(self.chunks)))
        lengths = (*self.decodes, *(0,) * (num_decodes - len(self.decodes)))
        return Rows(
            (1,) * num_decodes + tuple(num for num, _ in chunks),
            lengths + tuple(length for _, length in chunks),
            self.num_shared,
            self.others,
        )


_OTHERS = (700, 650, 680, 650, 690, 650)
DECODES = (
    Replay(MANY_ROWS, (900, 650, 720, 641, *_OTHERS), num_shared=640),
    Replay(FEW_ROWS, (20, 3, 40)),
    Replay(MANY_ROWS, (200, 90, 70, 610, *_OTHERS)),
    Replay(FEW_ROWS, (200, 90, 1, 33)),
    Replay(PLAIN, (61, 5, 340)),
    Replay(PLAIN, (300, 90, 70, 610, *_OTHERS)),
    Replay(MANY_ROWS, (500, 399, 720, 641, *_OTHERS, 410), num_shared=384, others=(1, 7)),
)
CHUNKS = (
    Replay(
        MIXED,
        (400, 341, 322, 350, 399, 321, 330, 385, 360, 337),
        ((17, 340), (30, 350)),
        num_shared=320,
    ),
    Replay(PROMPTS, chunks=((9, 20), (5, 5), (2, 40))),
    Replay(PLAIN_MIXED, (400, 341, 22, 350, 399, 321, 330, 385, 360), ((17, 340), (30, 350))),
    Replay(MIXED, chunks=((1, 1), (40, 40), (1, 300), (3, 90))),
    Replay(PLAIN_MIXED, (64, 1, 200, 18), ((7, 9),)),
    Replay(PROMPTS, chunks=((12, 200),)),
    Replay(MIXED, (64, 1, 200, 17), ((5, 5),)),
)
"""The inputs of successive replays: for decodes alone, and for prompts with and without decodes."""


def replays(
    spec: KernelSpec,
    problem: AttentionProblem,
    device: torch.device,
    wanted: Iterable[Replay] | None = None,
) -> None:
    """Capture the steps that a kernel serves, and replay them as `wanted`. Raises AssertionError naming the case.

    A decode problem runs in decode steps. A prefill problem also runs in mixed steps, with the same
    backend for decodes if it declares them.
    """
    if problem.phase == "decode":
        _replay([problem], spec, tuple(wanted or DECODES), device)
        return
    decode = replace(problem, phase="decode")
    is_declared = not any(problem_refusals(spec.capability, asdict(decode)))
    _replay([problem, decode] if is_declared else [problem], spec, tuple(wanted or CHUNKS), device)


def _replay(
    problems: Sequence[AttentionProblem],
    spec: KernelSpec,
    wanted: Sequence[Replay],
    device: torch.device,
) -> None:
    """Capture a step of every size, the largest first, then replay. `problems` differ in the phase.

    As in the worker, one step of a kind runs before its capture.
    """
    problem = problems[0]
    sizes = sorted(
        {each.size for each in wanted},
        key=lambda size: (size.num_rows, size.num_tokens),
        reverse=True,
    )
    longest = max(256, *(length for each in wanted for length in each.rows().seq_lens))
    padding, *fixtures = (
        make_fixture(problem, each.rows(), device, seed=seed, max_len=longest)
        for seed, each in enumerate((Replay(sizes[0]), *wanted))
    )
    wide = padding.q.new_zeros(
        max(size.num_tokens for size in sizes),
        problem.num_heads + 2 * problem.num_kv_heads,
        problem.head_size,
    )
    buffers = replace(padding, q=wide[:, : problem.num_heads])
    limits = replace(limits_of(padding), max_num_tokens=len(buffers.q))
    kernels = {each.phase: spec.factory()(each, limits, device) for each in problems}
    pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
    run_before = (sizes[0], PLAIN, PLAIN_MIXED)
    steps = {
        size: _Step(size, kernels, buffers, pool, runs_before=size in run_before) for size in sizes
    }
    for each, fixture in zip(wanted, fixtures, strict=True):
        steps[each.size].fill(fixture)
        steps[each.size].run()
        steps[each.size].agrees(fixture, problem, f"{problem}: a captured step replayed as {each}")


class _Step:
    """A step of one size in the buffers of the largest, captured with padding only."""

    def __init__(
        self,
        size: BucketSize,
        kernels: Mapping[str, AttentionKernel],
        buffers: Fixture,
        pool: Any,
        *,
        runs_before: bool,
    ) -> None:
        self._size, self._buffers = size, buffers
        middle, device = size.num_decodes, buffers.q.device
        self._chunk_start = torch.zeros(size.num_chunks + 1, dtype=torch.int32, device=device)
        self._out = [
            buffers.q.new_zeros((size.num_tokens, buffers.q.shape[1], buffers.v_cache.shape[3]))
            for _ in range(NUM_CALLS)
        ]
        self._parts: list[tuple[AttentionKernel, AttentionStep, slice]] = []
        if "decode" in kernels and middle:
            start = torch.arange(middle + 1, dtype=torch.int32, device=device)
            self._parts.append(
                (kernels["decode"], self._part(0, middle, middle, 1, start), slice(middle))
            )
        if size.num_chunks:
            most = size.num_chunk_tokens
            step = self._part(middle, size.num_chunks, most, most, self._chunk_start)
            self._parts.append((kernels["prefill"], step, slice(middle, size.num_tokens)))
        is_cuda = device.type == "cuda"
        self._side: torch.cuda.Stream | None = None
        if is_cuda and len(self._parts) > 1:
            self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graph: torch.cuda.CUDAGraph | None = None
        self._prepare()
        if runs_before:
            self._forward()  # libraries allocate, which they may not do in a capture
        if is_cuda:
            torch.cuda.synchronize(device)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, pool=pool):
                self._forward()

    def fill(self, fixture: Fixture) -> None:
        """Write a fixture's rows into the buffers."""
        buffers, rows, tokens = self._buffers, self._size.num_rows, len(fixture.q)
        buffers.step.seq_lens[:rows].copy_(fixture.step.seq_lens)
        buffers.step.block_table[:rows].copy_(fixture.step.block_table)
        self._chunk_start.copy_(
            fixture.step.query_start[self._size.num_decodes :] - self._size.num_decodes
        )
        buffers.q[:tokens].copy_(fixture.q)
        buffers.k_cache[: len(fixture.k_cache)].copy_(fixture.k_cache)
        buffers.v_cache[: len(fixture.v_cache)].copy_(fixture.v_cache)
        if buffers.sinks is not None and fixture.sinks is not None:
            buffers.sinks.copy_(fixture.sinks)

    def run(self) -> None:
        """Run the step into an output of NaN."""
        for out in self._out:
            out.fill_(float("nan"))
        if self._graph is None or not all(
            getattr(kernel, "prepares_on_host", False) for kernel, *_ in self._parts
        ):
            self._prepare()
        if self._graph is None:
            self._forward()
        else:
            self._graph.replay()

    def agrees(self, fixture: Fixture, problem: AttentionProblem, case: str) -> None:
        """Compare each layer's output with the definition; only padding of chunks may be unwritten."""
        tolerance = common_ops()["attention"].tolerance(problem.dtype)
        for out in self._out:
            for _, _, tokens in self._parts:
                found, expected = out[: len(fixture.q)][tokens].float(), fixture.expected[tokens]
                assert not found.isnan().any(), f"{case}: NaN, or unwritten rows"
                found = torch.where(expected.isnan(), expected, found)  # of padding rows, anything
                torch.testing.assert_close(
                    found,
                    expected,
                    rtol=tolerance.relative,
                    atol=tolerance.absolute,
                    equal_nan=True,
                    msg=labeled(case),
                )

    def _part(
        self, first: int, num_rows: int, num_tokens: int, most: int, start: torch.Tensor
    ) -> AttentionStep:
        whole, rows = self._buffers.step, slice(first, first + num_rows)
        return AttentionStep(
            num_rows=num_rows,
            num_tokens=num_tokens,
            max_num_query=most,
            max_seq_len=whole.max_seq_len,
            query_start=start,
            seq_lens=whole.seq_lens[rows],
            block_table=whole.block_table[rows],
            host_query_start=None,
            host_seq_lens=None,
            shares_prefix=bool(first) or not self._size.no_shared_prefix,
            overlaps_prefill=self._size.num_chunks > 0 and not first,
        )

    def _prepare(self) -> None:
        for kernel, step, _ in self._parts:
            kernel.prepare(step)

    def _forward(self) -> None:
        for out in self._out:
            first, *others = self._parts
            if self._side is not None:
                self._side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._side):
                for part in others:
                    self._attend(part, out)
            self._attend(first, out)
            if self._side is not None:
                torch.cuda.current_stream().wait_stream(self._side)

    def _attend(
        self, part: tuple[AttentionKernel, AttentionStep, slice], out: torch.Tensor
    ) -> None:
        kernel, _, tokens = part
        run(kernel, replace(self._buffers, q=self._buffers.q[tokens]), out[tokens])
