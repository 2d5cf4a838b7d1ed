"""The fused all-reduce in Triton's interpreter: all processes send, then each one receives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenspeed_kernels.reference.norm import add_rms_norm
from tokenspeed_kernels.triton.comm import all_reduce_norm
from tokenspeed_kernels.triton.comm.all_reduce_norm import (
    FusedAllReduce,
    QuantizingAllReduce,
    SharedMemory,
    num_inbox_values,
)

pytestmark = pytest.mark.interpreter
EPS = 1e-5


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let programs take turns with few rows. The interpreter runs one program after another."""
    monkeypatch.setattr(all_reduce_norm, "NUM_PROGRAMS", 8)


@dataclass
class World:
    """The kernels of all processes, and their memory."""

    kernels: list[FusedAllReduce] | list[QuantizingAllReduce]
    memories: list[SharedMemory]
    inboxes: list[Tensor]

    def are_inboxes_empty(self) -> bool:
        """Return whether all inboxes hold negative zeros only."""
        return all(bool(((each == 0) & each.signbit()).all()) for each in self.inboxes)


def world(
    num_processes: int, size: int, max_num_tokens: int, dtype: str, num_scales: int = 0
) -> World:
    """Return processes that quantize rows with `num_scales` scales, 0: not at all."""
    problem = {
        "num_processes": num_processes,
        "size": size,
        "max_num_tokens": max_num_tokens,
        "dtype": dtype,
    }
    inbox_size = num_inbox_values(problem)
    inboxes = [
        torch.full((2 * (num_processes - 1) * inbox_size,), -0.0, dtype=getattr(torch, dtype))
        for _ in range(num_processes)
    ]
    addresses = torch.tensor([each.data_ptr() for each in inboxes])
    num_programs = all_reduce_norm.NUM_PROGRAMS
    memories = [
        SharedMemory(
            addresses,
            torch.zeros(num_programs, dtype=torch.int64),
            inbox_size,
            torch.zeros(1, dtype=torch.int32),
        )
        for _ in range(num_processes)
    ]
    if num_scales:
        quantizing = [
            QuantizingAllReduce(problem, rank, memory, num_scales)
            for rank, memory in enumerate(memories)
        ]
        return World(quantizing, memories, inboxes)
    kernels = [FusedAllReduce(problem, rank, memory) for rank, memory in enumerate(memories)]
    return World(kernels, memories, inboxes)


def run(where: World, x: Tensor, residual: Tensor, weight: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return the result of each process. x is [P, T, N]; the residual may be strided."""
    residuals = [residual.clone(memory_format=torch.preserve_format) for _ in where.kernels]
    results = [torch.full(x.shape[1:], torch.nan, dtype=x.dtype) for _ in where.kernels]
    for phase in ("send", "receive"):
        for rank, kernel in enumerate(where.kernels):
            kernel.launch(
                x[rank],
                residuals[rank],
                weight,
                results[rank],
                EPS,
                send=phase == "send",
                receive=phase == "receive",
            )
    return list(zip(results, residuals, strict=True))


def expected(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x[0].float()
    for part in x[1:]:
        total = total + part.float()
    norm: Any = add_rms_norm({"dtype": str(x.dtype).removeprefix("torch.")})
    result: tuple[Tensor, Tensor] = norm(total.to(x.dtype), residual.clone(), weight, EPS)
    return result


def inputs(
    num_processes: int, num_rows: int, size: int, dtype: str, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(num_processes, num_rows, size + 3, generator=generator)
    residual = torch.randn(num_rows, size, generator=generator)
    weight = 1 + torch.randn(size, generator=generator) / 10
    x, residual, weight = (each.to(getattr(torch, dtype)) for each in (wide, residual, weight))
    return x[..., :size], residual, weight


@pytest.mark.parametrize(
    ("num_processes", "num_rows", "size", "dtype"),
    [
        (2, 1, 64, "float32"),
        (2, 19, 48, "float32"),
        (2, 60, 16, "float32"),
        (2, 3, 1024, "bfloat16"),
        (4, 7, 200, "float32"),
        (4, 9, 96, "bfloat16"),
    ],
)
def test_kernel_computes_the_contract(
    num_processes: int, num_rows: int, size: int, dtype: str
) -> None:
    where = world(num_processes, size, num_rows, dtype)
    x, residual, weight = inputs(num_processes, num_rows, size, dtype)
    wanted = expected(x, residual, weight)
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    found = run(where, x, residual, weight)
    for result in found:
        for value, reference, first in zip(result, wanted, found[0], strict=True):
            torch.testing.assert_close(value, reference, rtol=tolerance, atol=tolerance)
            assert torch.equal(value, first)
    if dtype == "float32":  # the interpreter truncates values to bfloat16
        assert torch.equal(found[0][1], wanted[1]), "sums are not in the order of ranks"


def test_calls_of_any_number_of_rows_follow_each_other() -> None:
    where = world(2, 32, 50, "float32")
    for call, num_rows in enumerate((5, 50, 1, 0, 3, 9)):
        x, residual, weight = inputs(2, num_rows, 32, "float32", seed=call)
        wanted = expected(x, residual, weight)
        for result in run(where, x, residual, weight):
            torch.testing.assert_close(result, wanted, rtol=1e-5, atol=1e-5)
        assert where.are_inboxes_empty()
    for memory in where.memories:
        assert memory.calls[:6].tolist() == [5, 4, 4, 3, 3, 2]


def test_next_call_is_sent_before_another_process_receives() -> None:
    where = world(2, 32, 4, "float32")
    first, second = (inputs(2, 4, 32, "float32", seed=seed) for seed in (1, 2))
    (x, residual, weight), (next_x, _, _) = first, second
    results = [torch.empty(4, 32) for _ in range(2)]
    residuals = [residual.clone() for _ in range(2)]

    def launch(rank: int, x: Tensor, **phases: bool) -> None:
        where.kernels[rank].launch(x[rank], residuals[rank], weight, results[rank], EPS, **phases)

    for rank in range(2):
        launch(rank, x, receive=False)
    launch(0, x, send=False)
    launch(0, next_x, receive=False)  # process 1 has not received the first call yet
    launch(1, x, send=False)
    wanted = expected(x, residual, weight)
    for rank in range(2):
        torch.testing.assert_close((results[rank], residuals[rank]), wanted, rtol=1e-5, atol=1e-5)


def test_float32_weights_are_not_rounded() -> None:
    where = world(2, 64, 2, "bfloat16")
    x, residual, _ = inputs(2, 2, 64, "bfloat16")
    weight = torch.full((64,), 1 + 2**-12)
    (result, _), _ = run(where, x, residual, weight)
    wide = expected(x, residual, torch.ones(64, dtype=torch.bfloat16))[0].float()
    torch.testing.assert_close(result, (wide * weight).to(torch.bfloat16), rtol=1e-2, atol=1e-2)


def test_negative_zeros_arrive_as_zeros() -> None:
    where = world(2, 32, 2, "bfloat16")
    x = torch.full((2, 2, 32), -0.0, dtype=torch.bfloat16)
    residual = torch.full((2, 32), -0.0, dtype=torch.bfloat16)
    for result, sums in run(where, x, residual, torch.ones(32, dtype=torch.bfloat16)):
        assert not result.any()
        assert not sums.any()
    assert where.are_inboxes_empty()


def test_abort_ends_the_waiting() -> None:
    where = world(2, 32, 3, "float32")
    x, residual, weight = inputs(2, 3, 32, "float32")
    for memory in where.memories:
        memory.is_aborted.fill_(1)
    for own, kernel in zip(x, where.kernels, strict=True):
        kernel.launch(own, residual, weight, torch.empty_like(residual), EPS, send=False)
