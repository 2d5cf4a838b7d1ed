"""The fused all-reduce of several processes that share one GPU: each has a stream, and they wait for each other."""

from __future__ import annotations

import sys
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenspeed_kernels.triton.comm import all_reduce_norm
from tokenspeed_kernels.triton.quantize.fp8_per_group import quantize_fp8_groups
from tokenspeed_kernels.triton.quantize.fp8_per_token import quantize_fp8

sys.path.insert(0, str(Path(__file__).parents[1] / "interpreter"))

from test_all_reduce_norm import EPS, World, expected, inputs, world

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# The separate kernel, and the number of elements that share a scale.
FP8_FORMS: dict[str, tuple[Any, int]] = {
    "fp8": (quantize_fp8, 1 << 20),
    "fp8_groups": (quantize_fp8_groups, 128),
}
needs_fp8 = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9),
    reason="needs compute capability 8.9",
)


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the programs of all processes fit on one GPU, since they wait for each other, and take turns with rows."""
    monkeypatch.setattr(all_reduce_norm, "NUM_PROGRAMS", 32)


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
        return [result[0] for result in self.call_all(x, residuals, weight)]

    def call_all(
        self, x: Tensor, residuals: list[Tensor], weight: Tensor
    ) -> list[tuple[Tensor, ...]]:
        """Return all results of each process, as `call` does."""
        main, results = torch.cuda.current_stream(), []
        for rank, (kernel, stream) in enumerate(zip(self.where.kernels, self.streams, strict=True)):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                results.append(kernel(x[rank], residuals[rank], weight, EPS))
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


def emulated(num_processes: int, size: int, max_num_tokens: int, num_scales: int) -> Processes:
    with torch.device("cuda"):
        where = world(num_processes, size, max_num_tokens, "bfloat16", num_scales)
        return Processes(where, size)


def assert_same_bits(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    for value, expected_value in zip(found, wanted, strict=True):
        assert torch.equal(value.view(torch.uint8), expected_value.view(torch.uint8))


@needs_fp8
@pytest.mark.parametrize("form", FP8_FORMS)
@pytest.mark.parametrize(("num_processes", "size"), [(2, 4096), (4, 2048), (2, 5120), (2, 208)])
def test_codes_equal_separate_kernels_bitwise(form: str, num_processes: int, size: int) -> None:
    make, group = FP8_FORMS[form]
    plain = emulated(num_processes, size, 200, 0)
    quantizing = emulated(num_processes, size, 200, ceil(size / group))
    quantize = make({"size": size, "dtype": "bfloat16"})
    for call, num_rows in enumerate((1, 2, 64, 65, 200, 3, 1, 130) * 10):
        x, residual, weight = (
            each.to("cuda") for each in inputs(num_processes, num_rows, size, "bfloat16", call)
        )
        totals = [residual.clone() for _ in range(num_processes)]
        rows = plain.call(x, totals, weight)[0]
        residuals = [residual.clone() for _ in range(num_processes)]
        for results in quantizing.call_all(x, residuals, weight):
            assert_same_bits(results, (*quantize(rows), totals[0]))


@needs_fp8
@pytest.mark.parametrize("form", FP8_FORMS)
def test_captured_quantizing_calls_replay(form: str) -> None:
    make, group = FP8_FORMS[form]
    size = 4096
    plain, quantizing = (emulated(2, size, 8, count) for count in (0, ceil(size / group)))
    quantize = make({"size": size, "dtype": "bfloat16"})
    x, residual, weight = (each.to("cuda") for each in inputs(2, 8, size, "bfloat16"))
    residuals = [residual.clone() for _ in range(2)]
    graph = torch.cuda.CUDAGraph()
    found: list[tuple[Tensor, ...]] = []
    with torch.cuda.graph(graph):
        for _ in range(3):
            found = quantizing.call_all(x, residuals, weight)
    totals = [residual.clone() for _ in range(2)]
    for _ in range(3):
        rows = plain.call(x, totals, weight)[0]
    wanted = (*quantize(rows), totals[0])
    for _ in range(20):
        for each in residuals:
            each.copy_(residual)
        graph.replay()
        for results in found:
            assert_same_bits(results, wanted)
