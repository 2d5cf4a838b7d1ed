"""All-reduce through symmetric memory, with torch's ops replaced by gloo: choice by size, selection and refusals."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from process_pool import ProcessPool, RankBuild, Sizes, tensor_parallel
from tokenspeed_testing.comm import CommConformance
from torch import Tensor, distributed
from torch.distributed.distributed_c10d import _resolve_process_group

from tokenspeed_core.api import (
    Capability,
    Collective,
    CommGroup,
    KernelSpec,
    ParallelLayout,
    PlatformInfo,
    Problem,
)
from tokenspeed_core.errors import SelectionError
from tokenspeed_core.kernels.installed import installed_kernels, installed_ops
from tokenspeed_core.kernels.overrides import Override
from tokenspeed_core.kernels.select import Selector
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_kernels import symmetric_memory
from tokenspeed_kernels.collectives import SYMM_COMM

HOPPER = PlatformInfo("cuda", (9, 0))
ONE_SHOT, TWO_SHOT = "one_shot_all_reduce_copy_out", "two_shot_all_reduce_"


@cache
def gloo_ops() -> torch.library.Library:
    """Implement torch's two ops on the CPU, so that calls are checked against their real signatures."""
    library = torch.library.Library("symm_mem", "IMPL", "CPU")

    def one_shot(buffer: Tensor, x: Tensor, reduce_op: str, group: str, out: Tensor) -> Tensor:
        assert buffer.shape == out.shape
        assert reduce_op == "sum"
        buffer.copy_(x)
        distributed.all_reduce(buffer, group=_resolve_process_group(group))
        return out.copy_(buffer)

    def two_shot(buffer: Tensor, reduce_op: str, group: str) -> Tensor:
        assert reduce_op == "sum"
        distributed.all_reduce(buffer, group=_resolve_process_group(group))
        return buffer

    library.impl(ONE_SHOT, one_shot)
    library.impl(TWO_SHOT, two_shot)
    return library


def on_cpu(group: CommGroup, size: int, dtype: torch.dtype) -> symmetric_memory.SymmetricBuffer:
    return symmetric_memory.SymmetricBuffer(torch.full((size,), torch.nan, dtype=dtype), (), ())


def on_gloo(problem: Problem, group: CommGroup) -> Any:
    """Return the kernel with a buffer on the CPU. Runs in the processes of the conformance kit only."""
    gloo_ops()
    symmetric_memory.allocate = on_cpu
    return symmetric_memory.all_reduce(problem, group)


def test_two_processes_compute_the_contract() -> None:
    capability = Capability(platforms=("cpu",), dtypes=SYMM_COMM.capability.dtypes)
    spec = KernelSpec("all_reduce", "symm", capability, load=f"{__name__}:on_gloo")
    suite: CommConformance = type("Suite", (CommConformance,), {"spec": spec})()
    suite.test_two_processes_compute_the_contract()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, int]]]:
    """Record the algorithm and the number of values of each sum. Each one multiplies by two."""
    recorded: list[tuple[str, int]] = []

    def one_shot(buffer: Tensor, x: Tensor, reduce_op: str, group: str, out: Tensor) -> Tensor:
        assert x.storage_offset() == 0
        recorded.append(("one-shot", x.numel()))
        return out.copy_(2 * x)

    def two_shot(buffer: Tensor, reduce_op: str, group: str) -> Tensor:
        recorded.append(("two-shot", buffer.numel()))
        return buffer.mul_(2)

    def large(x: Tensor) -> Tensor:
        recorded.append(("nccl", x.numel()))
        return x.mul_(2)

    monkeypatch.setattr(symmetric_memory.comm, "all_reduce", lambda problem, group: large)
    monkeypatch.setattr(symmetric_memory, "allocate", on_cpu)
    with torch.library._scoped_library("symm_mem", "IMPL") as library:
        library.impl(ONE_SHOT, one_shot, "CPU")
        library.impl(TWO_SHOT, two_shot, "CPU")
        yield recorded


class Handle:
    group_name = "0"


def kernel(dtype: str, size: int) -> Any:
    group = ParallelLayout.of(0, attn=2).group("attn")
    problem = {"num_processes": 2, "num_nodes": 1, "size": size, "dtype": dtype}
    return symmetric_memory.all_reduce(problem, CommGroup(group, Handle()))


@pytest.mark.parametrize(
    ("dtype", "num_rows", "algorithm"),
    [
        ("bfloat16", 8, "one-shot"),  # 64 KB
        ("bfloat16", 9, "two-shot"),
        ("float32", 4, "one-shot"),
        ("float32", 5, "two-shot"),
        ("bfloat16", 2048, "two-shot"),  # 16 MB
        ("bfloat16", 2049, "nccl"),
        ("float32", 1025, "nccl"),
    ],
)
def test_size_decides_the_algorithm(
    calls: list[tuple[str, int]], dtype: str, num_rows: int, algorithm: str
) -> None:
    x = torch.ones(num_rows, 4096, dtype=getattr(torch, dtype))
    total = kernel(dtype, 4096)(x)
    assert calls == [(algorithm, x.numel())]
    assert total.shape == x.shape
    assert bool((total == 2).all())


def test_parts_of_tensors_are_copied_first(calls: list[tuple[str, int]]) -> None:
    whole = torch.ones(3, 8)
    for x in (whole[1:], whole[:, 2:6]):
        total = kernel("float32", x.shape[1])(x)
        assert total.shape == x.shape
        assert bool((total == 2).all())
    assert [name for name, _ in calls] == ["one-shot"] * 2


def test_processes_on_two_nodes_are_refused() -> None:
    with pytest.raises(RuntimeError, match="node-a, node-b") as refused:
        symmetric_memory.check_peers([("node-a", 0), ("node-b", 0)], lambda *pair: True)
    assert "\n" not in str(refused.value)


def test_gpus_without_peer_access_are_refused() -> None:
    places = [("node", index) for index in range(3)]
    symmetric_memory.check_peers(places, lambda first, second: first != second)
    with pytest.raises(RuntimeError, match=r"GPU 1 .* GPU 2") as refused:
        symmetric_memory.check_peers(places, lambda *pair: pair != (1, 2))
    assert "\n" not in str(refused.value)


class NumberedRendezvous:
    """torch's symmetric memory in one process: each rendezvous has a number, over all groups."""

    count = 0

    @classmethod
    def empty_strided_p2p(cls, size: tuple[int], *arguments: object) -> Tensor:
        return torch.empty(size)

    @classmethod
    def rendezvous(cls, own: Tensor, name: str) -> Any:
        group = _resolve_process_group(name)
        numbers = [0] * distributed.get_world_size(group)
        distributed.all_gather_object(numbers, cls.count, group=group)
        cls.count += 1
        assert len(set(numbers)) == 1
        return SimpleNamespace(get_buffer=lambda *arguments: own, buffer_ptrs=numbers)


@contextmanager
def numbered_rendezvous(rank: int) -> Iterator[None]:
    """Replace torch's symmetric memory, as if this process used GPU `rank` and had had no rendezvous."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(symmetric_memory, "_SymmetricMemory", NumberedRendezvous)
        patch.setattr(symmetric_memory, "_num_rendezvous", 0)
        patch.setattr(torch.cuda, "current_device", lambda: rank)
        patch.setattr(torch.cuda, "can_device_access_peer", lambda *pair: True)
        NumberedRendezvous.count = 0
        yield


def allocate_repeatedly(build: RankBuild, num_before: int) -> int:
    """Allocate two buffers in a process that has had `num_before` rendezvous in an earlier engine."""
    group = CommGroup(build.group("attn"), build._handles["attn"])
    with numbered_rendezvous(group.group.rank):
        if group.group.rank == 0:
            symmetric_memory.catch_up(num_before, torch.device("cpu"))
        for _ in range(2):
            symmetric_memory.allocate(group, 8, torch.float32)
    return NumberedRendezvous.count


def test_process_of_an_earlier_engine_shares_memory_with_new_ones(pool: ProcessPool) -> None:
    assert list(pool.run(allocate_repeatedly, tensor_parallel(4), 3)) == [5] * 4


def allocate_in_two_groups(build: RankBuild) -> list[int]:
    """Allocate buffers in the groups of attention and of MLPs. Return how many processes share each."""
    with numbered_rendezvous(build.group("attn").rank):
        groups = [CommGroup(build.group(name), build._handles[name]) for name in ("attn", "dense")]
        buffers = [symmetric_memory.allocate(group, 8, torch.float32) for group in 2 * groups]
    return [len(each.all) for each in buffers]


def test_processes_share_memory_in_two_groups(pool: ProcessPool) -> None:
    assert list(pool.run(allocate_in_two_groups, Sizes(attn=4, dense=2))) == [[4, 2, 4, 2]] * 4


def selector(platform: PlatformInfo, *backends: str) -> Selector:
    catalog = Catalog.discover()
    overrides = [Override.parse("all_reduce", backends)] if backends else []
    return Selector(installed_kernels(catalog), platform, overrides, ops=installed_ops(catalog))


def collective(dtype: str = "bfloat16", size: int = 4096) -> Collective:
    return Collective("all_reduce", "attn", size, dtype, "a", "b", "a is partial")


def test_it_is_chosen_by_name_only() -> None:
    plain = selector(HOPPER)
    assert plain.select_collective(collective(), 2, 1).spec.backend == "nccl"
    (planned,) = plain.plan().find("all_reduce")
    (verdict,) = (each for each in planned.verdicts if each.backend == "symm")
    assert verdict.fits
    (reason,) = verdict.reasons
    assert "--kernel-backend all_reduce=symm" in reason.hint
    assert selector(HOPPER, "symm").select_collective(collective(), 2, 1).spec == SYMM_COMM


@pytest.mark.parametrize(
    ("platform", "dtype", "size", "num_processes", "named"),
    [
        (PlatformInfo("cpu"), "bfloat16", 4096, 2, "device cpu"),
        (HOPPER, "float16", 4096, 2, "dtype float16"),
        (HOPPER, "bfloat16", 4095, 2, "size 4095"),
        (HOPPER, "bfloat16", 4096, 16, "num_processes 16"),
    ],
)
def test_problems_that_it_does_not_fit_are_refused(
    platform: PlatformInfo, dtype: str, size: int, num_processes: int, named: str
) -> None:
    with pytest.raises(SelectionError) as refused:
        selector(platform, "symm").select_collective(collective(dtype, size), num_processes, 1)
    (line,) = (each for each in str(refused.value).splitlines() if each.strip().startswith("symm"))
    assert named in line


def test_one_process_has_nothing_to_add_up() -> None:
    with pytest.raises(SelectionError, match=r"all_reduce has no effect"):
        selector(HOPPER, "symm").check()
