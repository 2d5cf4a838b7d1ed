"""Processes that compute together: each one runs the same function in the same process groups.

They are started once, from a server that has imported torch and the engine already.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from tokenspeed_core.api import (
    FUSED_OP,
    ONE_PROCESS,
    Collective,
    CommGroup,
    FusedCollective,
    LayerSchemes,
    OpContract,
    ParallelLayout,
    QuantizationScheme,
    SentSummands,
)
from tokenspeed_core.kernels.installed import installed_ops
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_core.targets import load_target
from tokenspeed_kernels.reference import comm
from tokenspeed_models.testing import DenseBuild

_TIMEOUT = 60.0  # seconds
PRELOADED = [
    "tokenspeed_core.engine.process",
    "tokenspeed_core.worker.local",
    "tokenspeed_models.testing",
    "tokenspeed_testing.comm",  # starts its processes from the same server
]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of the process groups."""

    attn: int = 1
    dense: int = 1
    moe: int = 1
    experts: int = 1
    data: int = 1

    def layout(self, rank: int) -> ParallelLayout:
        return ParallelLayout.of(
            rank,
            attn=self.attn,
            dense=self.dense,
            moe=self.moe,
            experts=self.experts,
            data=self.data,
        )

    def __str__(self) -> str:
        sizes = f"attn{self.attn}-dense{self.dense}-moe{self.moe}-experts{self.experts}"
        return f"{sizes}-data{self.data}"


def tensor_parallel(size: int) -> Sizes:
    """Return the groups of `--tp SIZE`."""
    return Sizes(attn=size, dense=size, moe=size)


class Handles:
    """The torch.distributed groups of one process, by their ranks. All processes of the pool ask for the same."""

    def __init__(self, rank: int, num_processes: int) -> None:
        self._rank, self._num_processes = rank, num_processes
        self._made: dict[tuple[int, ...], Any] = {}

    def of(self, sizes: Sizes) -> tuple[ParallelLayout, Mapping[str, Any]] | None:
        """Return the layout of this process and its handles, None if it takes no part."""
        world_size = sizes.layout(0).world_size
        layouts = [sizes.layout(rank) for rank in range(world_size)]
        for name in layouts[0].groups:
            for ranks in dict.fromkeys(layout.group(name).ranks for layout in layouts):
                if ranks not in self._made:
                    self._made[ranks] = distributed.new_group(list(ranks))
        if self._rank >= world_size:
            return None
        layout = layouts[self._rank]
        return layout, {name: self._made[each.ranks] for name, each in layout.groups.items()}


class Parts:
    """An `Overlap` that computes outputs in two parts, and adds up those of all processes afterwards."""

    min_num_tokens = 6

    def __init__(self, build: RankBuild, kernel: Callable[..., Any]) -> None:
        self._build, self._kernel = build, kernel

    def send(self, compute: Callable[[Any], Any], x: Any) -> SentSummands:
        self._build.num_sent += 1
        if isinstance(x, tuple):
            return SentSummands(
                tuple(map(compute, zip(*(each.split(4) for each in x), strict=True)))
            )
        return SentSummands(tuple(map(compute, x.split(4))))

    def receive(self, sent: SentSummands, residual: Any, weight: Any, eps: float) -> Any:
        return self._kernel(torch.cat(sent.parts), residual, weight, eps)


class RankBuild(DenseBuild):
    """A build of one of several processes. `schemes` says how linear layers are quantized."""

    def __init__(
        self, layout: ParallelLayout = ONE_PROCESS, handles: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(layout=layout)
        self._handles = handles or {}
        self.schemes: LayerSchemes = lambda layer: None
        self.max_fused_tokens = 0  # 0: collectives run alone
        self.sends_parts = False  # of fused all-reduces of several tokens
        self.num_sent = 0  # layers' outputs that were sent in parts
        self.fused_ops: list[str] = []  # of the all-reduces that may be fused

    def new(self) -> RankBuild:
        """Return the build of another model of this process."""
        return RankBuild(self._layout, self._handles)

    def scheme(self, layer: str) -> QuantizationScheme | None:
        return self.schemes(layer)

    def op(self, op: str, **problem: Any) -> Callable[..., Any]:
        try:
            return super().op(op, **problem)
        except KeyError:
            kernel: Callable[..., Any] = load_target(_installed_ops()[op].reference)(problem)
            return kernel

    def fused_comm(self, all_reduce: Collective) -> FusedCollective | None:
        if not self.max_fused_tokens:
            return None
        group = self.group(all_reduce.group)
        problem = {
            "num_processes": group.size,
            "num_nodes": 1,
            "size": all_reduce.size,
            "max_num_tokens": self.max_fused_tokens,
            "dtype": all_reduce.dtype,
        }
        self.fused_ops.append(all_reduce.fused_op)
        kernel = getattr(comm, all_reduce.fused_op)(
            problem, CommGroup(group, self._handles[group.name], self.token_counts)
        )
        if self.sends_parts:
            kernel.overlap = Parts(self, kernel)
        quantizes = all_reduce.fused_op != FUSED_OP
        return FusedCollective(kernel, self.comm(all_reduce), self.max_fused_tokens, quantizes)

    def comm(self, collective: Collective) -> Callable[[torch.Tensor], torch.Tensor]:
        group = self.group(collective.group)
        make = getattr(comm, collective.op)
        problem = {
            "num_processes": group.size,
            "num_nodes": 1,
            "size": collective.size,
            "dtype": collective.dtype,
        }
        kernel: Callable[[torch.Tensor], torch.Tensor] = make(
            problem, CommGroup(group, self._handles[group.name], self.token_counts)
        )
        return kernel


@cache
def _installed_ops() -> Mapping[str, OpContract]:
    return installed_ops(Catalog.discover())


class ProcessPool:
    """Processes of a gloo world. `run` may use the first ones only."""

    def __init__(self, num_processes: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._folder = tempfile.TemporaryDirectory()
        store = Path(self._folder.name) / "store"
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(num_processes):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, num_processes, str(store), theirs), daemon=True
            )
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], sizes: Sizes, *arguments: Any) -> Sequence[Any]:
        """Return `function(build, *arguments)` of each process that takes part."""
        for pipe in self._pipes:
            pipe.send((function, sizes, arguments))
        results = [pipe.recv() if pipe.poll(_TIMEOUT) else "no answer" for pipe in self._pipes]
        errors = [each for each in results if isinstance(each, str)]
        assert not errors, errors[0]
        return [each[0] for each in results if each]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(_TIMEOUT)
        self._folder.cleanup()


def _serve(rank: int, num_processes: int, store: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=num_processes,
        timeout=timedelta(seconds=_TIMEOUT),
    )
    handles = Handles(rank, num_processes)
    while (task := pipe.recv()) is not None:
        function, sizes, arguments = task
        try:
            found = handles.of(sizes)
            pipe.send(() if found is None else (function(RankBuild(*found), *arguments),))
        except Exception:
            pipe.send(traceback.format_exc())
    distributed.destroy_process_group()
