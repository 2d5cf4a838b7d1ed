"""The overlapped all-reduce in Triton's interpreter: the test transfers the parts."""

from __future__ import annotations

from math import ceil
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenspeed_kernels.reference.norm import add_rms_norm
from tokenspeed_kernels.triton.comm.overlap import OverlappedAllReduce, TwoInboxes
from tokenspeed_kernels.triton.quantize.fp8_per_group import quantize_fp8_groups
from tokenspeed_kernels.triton.quantize.fp8_per_token import quantize_fp8

pytestmark = pytest.mark.interpreter
EPS = 1e-5


def inputs(num_rows: int, size: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return the x [2, T, N] of both processes, the residual and the weight."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, num_rows, size, generator=generator)
    residual = torch.randn(num_rows, size, generator=generator)
    return x, residual, 1 + torch.randn(size, generator=generator) / 10


def two_memories(num_rows: int, size: int) -> list[TwoInboxes]:
    inboxes = [torch.empty(num_rows, size, dtype=torch.float32) for _ in range(2)]
    flags = [torch.zeros(3, dtype=torch.int32) for _ in range(2)]
    return [
        TwoInboxes(
            inboxes[rank],
            inboxes[1 - rank],
            flags[rank],
            flags[1 - rank],
            *(torch.zeros(1, dtype=torch.int32) for _ in range(2)),
        )
        for rank in range(2)
    ]


def two_processes(num_rows: int, size: int, num_scales: int = 0) -> list[Process]:
    problem = {"num_processes": 2, "size": size, "max_num_tokens": num_rows, "dtype": "float32"}
    return [
        Process(problem, memory, num_scales, None, 132)  # type: ignore[arg-type]
        for memory in two_memories(num_rows, size)
    ]


class Process(OverlappedAllReduce):
    """A process of a pair. The test copies its parts to the other process."""

    def transfer(self, x: Tensor) -> None:
        self._memory.other_inbox[: x.shape[0]] = x
        self._memory.other_flags[1:] = 1


def run(
    processes: list[Process], x: Tensor, residual: Tensor, weight: Tensor
) -> list[tuple[Tensor, ...]]:
    """Return the results of each process."""
    for process in processes:
        process._memory.flags[0] += 1  # the other process is ready
        process.meet()
        assert process._memory.flags[1:].tolist() == [0, 0]
    for process, own in zip(processes, x, strict=True):
        process.transfer(own)
    results = []
    for process, own in zip(processes, x, strict=True):
        mine = residual.clone()
        y, scale = process.outputs(mine)
        parts = own.contiguous().split((2, own.shape[0] - 2))
        process.launch(parts, mine, weight, y, scale, EPS)
        results.append((y, mine) if scale is None else (y, scale, mine))
    return results


@pytest.mark.parametrize(("num_rows", "size"), [(3, 64), (11, 48), (9, 200)])
def test_kernel_computes_the_contract(num_rows: int, size: int) -> None:
    processes = two_processes(num_rows, size)
    for call in range(3):
        x, residual, weight = inputs(num_rows, size, seed=call)
        wanted = add_rms_norm({"dtype": "float32"})(x[0] + x[1], residual.clone(), weight, EPS)
        first, second = run(processes, x, residual, weight)
        torch.testing.assert_close(first, wanted, rtol=1e-5, atol=1e-5)
        for value, other in zip(first, second, strict=True):
            assert torch.equal(value, other)


def test_processes_count_each_other() -> None:
    first, second = two_processes(3, 16)
    for call in range(1, 4):
        first._memory.flags[0] += 1
        first.meet()
        assert (int(first._memory.calls), int(second._memory.flags[0])) == (call, call)


@pytest.mark.parametrize(("make", "group"), [(quantize_fp8, 1 << 20), (quantize_fp8_groups, 128)])
def test_values_are_quantized(make: Any, group: int) -> None:
    size = 272
    x, residual, weight = inputs(5, size)
    normed, _ = run(two_processes(5, size), x, residual, weight)[0]
    wanted = make({"size": size, "dtype": "float32"})(normed)
    processes = two_processes(5, size, ceil(size / group))
    for *found, _ in run(processes, x, residual, weight):
        for value, expected_value in zip(found, wanted, strict=True):
            assert torch.equal(value.view(torch.uint8), expected_value.view(torch.uint8))


def test_abort_ends_the_waiting() -> None:
    process, _ = two_processes(3, 16)
    process._memory.is_aborted.fill_(1)
    x, residual, weight = inputs(3, 16)
    process.meet()
    process.launch((x[0],), residual, weight, torch.empty_like(residual), None, EPS)
