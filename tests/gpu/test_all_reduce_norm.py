"""The fused all-reduce of several processes that share one GPU: each has a stream, and they wait for each other."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "interpreter"))

from test_all_reduce_norm import EPS, World, expected, inputs, world

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Processes:
    """The kernels of all processes, each with a stream, its residual and its results."""

    def __init__(self, where: World, size: int) -> None:
        self.where = where
        self.streams = [torch.cuda.Stream() for _ in where.kernels]
        # A module that is loaded while another process waits could wait for it. No call waits here.
        for inboxes in where.inboxes:
            inboxes.fill_(1)
        x = torch.zeros(1, size, dtype=where.inboxes[0].dtype, device="cuda")
        for kernel in where.kernels:
            kernel(x, x.clone(), x[0], EPS)
        torch.cuda.synchronize()
        for memory, inboxes in zip(where.memories, where.inboxes, strict=True):
            memory.calls.zero_()
            inboxes.fill_(-0.0)
        torch.cuda.synchronize()

    def call(self, x: Tensor, residuals: list[Tensor], weight: Tensor) -> list[Tensor]:
        """Return the result [T, N] of each process; x is [P, T, N]. The current stream waits for all."""
        main, results = torch.cuda.current_stream(), []
        for rank, (kernel, stream) in enumerate(zip(self.where.kernels, self.streams, strict=True)):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                results.append(kernel(x[rank], residuals[rank], weight, EPS)[0])
        for stream in self.streams:
            main.wait_stream(stream)
        return results


def check(found: list[Tensor], residuals: list[Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    for result, residual in zip(found, residuals, strict=True):
        torch.testing.assert_close((result, residual), wanted, rtol=2e-2, atol=2e-2)
        assert torch.equal(result, found[0])
        assert torch.equal(residual, residuals[0])


@pytest.mark.parametrize(("num_processes", "size"), [(2, 4096), (4, 2048), (2, 5120)])
def test_processes_agree_over_many_calls(num_processes: int, size: int) -> None:
    with torch.device("cuda"):
        processes = Processes(world(num_processes, size, 200, "bfloat16"), size)
    for call, num_rows in enumerate((1, 2, 64, 65, 200, 3, 1, 130) * 25):
        x, residual, weight = (
            each.to("cuda") for each in inputs(num_processes, num_rows, size, "bfloat16", call)
        )
        residuals = [residual.clone() for _ in range(num_processes)]
        check(processes.call(x, residuals, weight), residuals, expected(x, residual, weight))


def test_captured_calls_replay() -> None:
    with torch.device("cuda"):
        processes = Processes(world(2, 4096, 8, "bfloat16"), 4096)
    x, residual, weight = (each.to("cuda") for each in inputs(2, 8, 4096, "bfloat16"))
    residuals = [residual.clone() for _ in range(2)]
    graph, found = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for _ in range(3):
            found = processes.call(x, residuals, weight)
    wanted = residual.clone(), residual.clone()
    for _ in range(20):
        for each in residuals:
            each.copy_(residual)
        wanted = residual.clone(), residual
        graph.replay()
        for _ in range(3):
            wanted = expected(x, wanted[1], weight)
        check(found, residuals, wanted)
