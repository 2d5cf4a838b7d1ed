"""The conformance kit finds what is wrong with a kernel; a kit that passes everything would prove nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from tokenspeed_testing.attention import check_attention
from tokenspeed_testing.conformance import check
from torch import Tensor

from tokenspeed_core.api import AttentionProblem, Capability, KernelSpec
from tokenspeed_kernels.reference.attention import TorchAttention

CPU = torch.device("cpu")
CLAIMS = frozenset({"batch_invariant", "window"})


@pytest.fixture
def spec_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Any], KernelSpec]:
    """Return a maker of specs whose factory is a function of the test."""

    def make(op: str, factory: Any) -> KernelSpec:
        module = ModuleType("kernel_under_test")
        module.factory = factory  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "kernel_under_test", module)
        capability = Capability(("cpu",), ("float32",), features=CLAIMS)
        return KernelSpec(op, "mine", capability, load="kernel_under_test:factory")

    return make


def right(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def writes_its_input(x: Tensor) -> Tensor:
    y = right(x)
    x.zero_()
    return y


def forgets_the_last_row(x: Tensor) -> Tensor:
    y = torch.empty(x.shape[0], x.shape[1] // 2)
    y[:-1] = right(x)[:-1]
    return y


def takes_rows_for_contiguous(x: Tensor) -> Tensor:
    return right(x.as_strided(x.shape, (x.shape[1], 1)))


def looks_at_other_rows(x: Tensor) -> Tensor:
    return right(x) + 1e-7 * x.shape[0]


def halves_exchanged(x: Tensor) -> Tensor:
    return right(x.roll(x.shape[1] // 2, dims=1))


def rounds_to_bfloat16(x: Tensor) -> Tensor:
    return right(x.to(torch.bfloat16)).to(x.dtype)


def test_correct_kernel_passes(spec_of: Callable[[str, Any], KernelSpec]) -> None:
    assert check(spec_of("silu_mul", lambda problem: right), CPU) == 16


@pytest.mark.parametrize(
    ("kernel", "complaint"),
    [
        (writes_its_input, "it wrote into x"),
        (forgets_the_last_row, "nan"),
        (takes_rows_for_contiguous, "strided"),
        (looks_at_other_rows, "depends on the others"),
        (halves_exchanged, "Mismatched elements"),
        (rounds_to_bfloat16, "Mismatched elements"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_wrong_kernel_is_caught(
    spec_of: Callable[[str, Any], KernelSpec], kernel: Callable[[Tensor], Tensor], complaint: str
) -> None:
    with pytest.raises(AssertionError, match=complaint) as caught:
        check(spec_of("silu_mul", lambda problem: kernel), CPU)
    assert "silu_mul" in str(caught.value)


PROBLEM = AttentionProblem("prefill", 4, 2, 16, "float32", "float32", 8, 0.25, 20)


class ReadsPastTheRow(TorchAttention):
    """Multiplies values that nobody wrote by a probability of zero, which is NaN if they are."""

    def prepare(self, step: Any) -> None:
        super().prepare(step)
        from dataclasses import replace

        self._batches = [replace(batch, unwritten=None) for batch in self._batches]


class IgnoresTheWindow(TorchAttention):
    def __init__(self, problem: AttentionProblem, limits: Any, device: torch.device) -> None:
        from dataclasses import replace

        super().__init__(replace(problem, window=None), limits, device)


class LeavesPaddingRows(TorchAttention):
    def prepare(self, step: Any) -> None:
        super().prepare(step)
        self._idle = []


@pytest.mark.parametrize("backend", [ReadsPastTheRow, IgnoresTheWindow, LeavesPaddingRows])
def test_wrong_attention_backend_is_caught(
    spec_of: Callable[[str, Any], KernelSpec], backend: Any
) -> None:
    assert check_attention(spec_of("attention", TorchAttention), CPU, cases=[PROBLEM]) == 6
    with pytest.raises(AssertionError, match="num_heads=4"):
        check_attention(spec_of("attention", backend), CPU, cases=[PROBLEM])
