"""The kernels of collectives conform to their contracts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tokenspeed_testing.comm import CommConformance

from tokenspeed_core.api import Capability, CommGroup, KernelSpec, Problem
from tokenspeed_kernels.collectives import ALLTOALL_COMM, TORCH_COMM


def conformance(spec: KernelSpec) -> CommConformance:
    made: CommConformance = type("Suite", (CommConformance,), {"spec": spec})()
    return made


def forgetful(problem: Problem, group: CommGroup) -> Callable[[Any], Any]:
    """Return a kernel that sends nothing."""
    return lambda x: x


@pytest.mark.parametrize("spec", [*TORCH_COMM, ALLTOALL_COMM], ids=lambda spec: spec.op)
def test_reference_conforms(spec: KernelSpec) -> None:
    conformance(spec).test_two_processes_compute_the_contract()


def test_kernel_that_sends_nothing_fails() -> None:
    capability = Capability(platforms=("cpu",), dtypes=("float32",))
    spec = KernelSpec("all_reduce", "mine", capability, load=f"{__name__}:forgetful")
    with pytest.raises(AssertionError, match="process"):
        conformance(spec).test_two_processes_compute_the_contract()
