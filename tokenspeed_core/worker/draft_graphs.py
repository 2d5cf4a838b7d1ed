"""The passes of a draft model after captured steps, as CUDA graphs.

The first pass, over a step's tokens, has a graph for each bucket. Passes over one token or one block of each row depend on
the number of rows only, so buckets share their graph, which is replayed for each further draft token or once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from tokenspeed_core.worker.block_pass import BlockPass
from tokenspeed_core.worker.draft_model import DraftRunner
from tokenspeed_core.worker.draft_passes import DraftPasses, PassBounds
from tokenspeed_core.worker.graph_recorder import GraphRecorder


@dataclass(frozen=True, slots=True, eq=False)
class FollowedRows:
    """The S rows of a step that is captured, as views of its buffers: `slots` and `capacity` int64 [S].

    `extend` runs the first pass and returns what `DraftRunner.extend` does. `prepare` prepares attention for it.
    """

    slots: torch.Tensor
    capacity: torch.Tensor
    extend: Callable[[], torch.Tensor | None]
    prepare: Callable[[], None]


@dataclass(frozen=True, slots=True, eq=False)
class _PassGraphs:
    """Passes over one token or block of each row. `graphs` has the graphs with greedy choice, then the graphs with sampling."""

    passes: DraftPasses | BlockPass
    graphs: tuple[tuple[torch.cuda.CUDAGraph, ...], ...]

    def replay(self, *, draws: bool) -> None:
        first, *others = self.graphs[draws]
        first.replay()
        for graph in others:
            self.passes.prepare()
            graph.replay()


@dataclass(frozen=True, slots=True, eq=False)
class FollowGraphs:
    """The passes after steps of a bucket. `first` are the graphs of greedy choices, and of draws."""

    first: tuple[torch.cuda.CUDAGraph, ...]
    others: _PassGraphs

    def replay(self, num_drafts: int, *, draws: bool) -> None:
        """Compute the cache entries of the step, and draft tokens."""
        self.first[draws].replay()
        for _ in range(self.others.passes.num_passes(num_drafts)):
            self.others.replay(draws=draws)


class DraftGraphs:
    """Captures the passes of a draft model."""

    def __init__(
        self,
        drafter: DraftRunner,
        record: GraphRecorder,
        bounds: Callable[[int], PassBounds],
        *,
        needs_prepare: bool,
    ) -> None:
        """`bounds` returns those of a number of rows. With `needs_prepare`, attention prepares between two graphs."""
        self._drafter, self._record, self._bounds = drafter, record, bounds
        self._needs_prepare = needs_prepare
        self._passes: dict[int, DraftPasses | BlockPass] = {}  # by number of rows
        self._graphs: dict[int, _PassGraphs] = {}

    def run_once(self, rows: FollowedRows) -> None:
        """Run all passes without recording them, after a step of padding."""
        passes = self._passes_of(rows)
        for draws in (False, True):
            rows.prepare()
            self._start(rows, passes, draws=draws)
            passes.begin()
            passes.prepare()
            passes.forward(draws=draws)

    def capture(self, rows: FollowedRows) -> FollowGraphs:
        """Capture the passes after steps of a bucket."""
        num_rows, passes = len(rows.slots), self._passes_of(rows)
        if num_rows not in self._graphs:
            passes.prepare()
            graphs = tuple(self._record_pass(passes, draws=draws) for draws in (False, True))
            self._graphs[num_rows] = _PassGraphs(passes, graphs)
        rows.prepare()
        first = tuple(
            self._record(partial(self._start, rows, passes, draws=draws)) for draws in (False, True)
        )
        return FollowGraphs(first, self._graphs[num_rows])

    def _passes_of(self, rows: FollowedRows) -> DraftPasses | BlockPass:
        num_rows = len(rows.slots)
        if num_rows not in self._passes:
            self._passes[num_rows] = self._drafter.passes(self._bounds(num_rows))
        return self._passes[num_rows]

    def _start(self, rows: FollowedRows, passes: DraftPasses | BlockPass, *, draws: bool) -> None:
        passes.start(rows.slots, rows.capacity, rows.extend(), draws=draws)

    def _record_pass(
        self, passes: DraftPasses | BlockPass, *, draws: bool
    ) -> tuple[torch.cuda.CUDAGraph, ...]:
        forward = partial(passes.forward, draws=draws)
        if self._needs_prepare:
            return self._record(passes.begin), self._record(forward)
        return (self._record(passes.begin, forward),)
