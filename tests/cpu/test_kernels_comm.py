"""The kernels of collectives conform to their contracts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from tokenspeed_testing.comm import CommConformance
from torch import Tensor

from tokenspeed_core.api import Capability, CommGroup, KernelSpec, Problem
from tokenspeed_core.worker import distributed
from tokenspeed_kernels.collectives import ALLTOALL_COMM, TORCH_COMM
from tokenspeed_kernels.reference import comm


def conformance(spec: KernelSpec) -> CommConformance:
    made: CommConformance = type("Suite", (CommConformance,), {"spec": spec})()
    return made


def forgetful(problem: Problem, group: CommGroup) -> Callable[[Any], Any]:
    """Return a kernel that sends nothing."""
    return lambda x: x


def rotated(problem: Problem, group: CommGroup) -> Callable[..., Any]:
    """Return a kernel that rotates the codes of the second process."""
    reduce = comm.all_reduce_add_rms_norm_fp8(problem, group)

    def rotate(*arguments: Any) -> tuple[Tensor, ...]:
        codes, scale, residual = reduce(*arguments)
        return codes.roll(group.group.rank, dims=1), scale, residual

    return rotate


@pytest.mark.parametrize("spec", [*TORCH_COMM, ALLTOALL_COMM], ids=lambda spec: spec.op)
def test_reference_conforms(spec: KernelSpec) -> None:
    conformance(spec).test_two_processes_compute_the_contract()


@pytest.mark.parametrize(
    ("op", "factory"),
    [
        ("all_reduce", forgetful),
        ("all_reduce_add_rms_norm_fp8_groups", comm.all_reduce_add_rms_norm_fp8),
        ("all_reduce_add_rms_norm_fp8", rotated),
    ],
)
def test_wrong_kernel_fails(op: str, factory: Callable[..., Any]) -> None:
    capability = Capability(platforms=("cpu",), dtypes=("float32",))
    load = f"{factory.__module__}:{factory.__name__}"
    spec = KernelSpec(op, "mine", capability, load=load)
    with pytest.raises(AssertionError, match="not close"):
        conformance(spec).test_two_processes_compute_the_contract()


def test_abort_ends_kernels_that_wait() -> None:
    ended = threading.Semaphore(0)
    distributed.on_abort(ended.release)
    distributed.abort()
    assert ended.acquire(timeout=10)
    distributed.close()
    distributed.abort()
    assert not ended.acquire(timeout=0.05)


def test_abort_ends_the_collectives_of_all_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []

    class Group:
        def __init__(self, index: int) -> None:
            self.abort = lambda: ended.append(index)

        def _get_backend(self, device: object) -> Group:
            return self

    monkeypatch.setattr(distributed, "_GROUPS", [Group(0), Group(1)])
    monkeypatch.setattr(distributed.dist, "get_backend", lambda group: "nccl")
    distributed.abort()
    distributed.close()
    assert ended == [0, 1]
