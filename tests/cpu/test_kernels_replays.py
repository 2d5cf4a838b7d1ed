"""The kit finds a backend that does not survive what the runner does with captured steps, as far as a CPU can tell."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any
from unittest import SkipTest

import pytest
import torch
from tokenspeed_testing.kernel import KernelConformance
from tokenspeed_testing.replays import CHUNKS, DECODES, replays
from torch import Tensor

from tokenspeed_core.api import AttentionProblem, AttentionStep, Capability, KernelSpec
from tokenspeed_kernels.reference.attention import TorchAttention

CPU = torch.device("cpu")
ASK = "test_cuda_graph_replay"
CAPABILITY = Capability(
    ("cpu", "cuda"),
    ("float32",),
    (99, 0),
    head_sizes=(16,),
    block_sizes=(8,),
    features=frozenset({"graph_safe"}),
)


def problem(phase: str) -> AttentionProblem:
    return AttentionProblem(phase, 4, 2, 16, "float32", "float32", 8, 0.25, None)


@pytest.fixture
def spec_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., KernelSpec]:
    """Return a maker of specs whose factory is a class of the test."""

    def make(factory: Any, **capability: Any) -> KernelSpec:
        module = ModuleType("kernel_under_test")
        module.factory = factory  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "kernel_under_test", module)
        return KernelSpec(
            "attention", "acme/mine", replace(CAPABILITY, **capability), "kernel_under_test:factory"
        )

    return make


class KeepsWhatItSawFirst(TorchAttention):
    """Plans each size of a step once, when it is captured."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._seen: dict[int, list[Any]] = {}

    def prepare(self, step: AttentionStep) -> None:
        super().prepare(step)
        self._batches = self._seen.setdefault(step.num_rows, self._batches)


class KeepsTheBlocks(TorchAttention):
    """Reads lengths anew, and the block table only where it has not seen a step of that size with rows."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._tables: dict[int, Tensor] = {}

    def prepare(self, step: AttentionStep) -> None:
        table = self._tables.get(step.num_rows)
        if table is None and bool(step.seq_lens.any()):
            table = self._tables[step.num_rows] = step.block_table.clone()
        super().prepare(step if table is None else replace(step, block_table=table.clamp(0)))


class TakesTheBoundForTheRows(TorchAttention):
    """Believes that a step has as many query tokens as it may have."""

    def prepare(self, step: AttentionStep) -> None:
        start = step.query_start.clone()
        start[-1] = step.num_tokens
        super().prepare(replace(step, query_start=start))


class SpendsItsPlan(TorchAttention):
    """Serves one layer, and has forgotten the step by the next."""

    def forward(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor) -> None:
        super().forward(q, k_cache, v_cache, out)
        self._batches = []


class LeavesPaddingRows(TorchAttention):
    def prepare(self, step: AttentionStep) -> None:
        super().prepare(step)
        self._idle = []


class AsksTheHost(TorchAttention):
    def prepare(self, step: AttentionStep) -> None:
        assert step.host_seq_lens is not None, "no lengths on the host"
        super().prepare(step)


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_correct_backend_replays(spec_of: Callable[..., KernelSpec], phase: str) -> None:
    replays(spec_of(TorchAttention), problem(phase), CPU)


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize(
    "wrong",
    [KeepsWhatItSawFirst, KeepsTheBlocks, SpendsItsPlan, AsksTheHost],
    ids=lambda wrong: str(wrong.__name__),
)
def test_stale_state_between_replays_is_caught(
    spec_of: Callable[..., KernelSpec], wrong: Any, phase: str
) -> None:
    with pytest.raises(AssertionError):
        replays(spec_of(wrong), problem(phase), CPU)


def test_unwritten_padding_is_caught(spec_of: Callable[..., KernelSpec]) -> None:
    with pytest.raises(AssertionError, match="NaN, or unwritten rows"):
        replays(spec_of(LeavesPaddingRows), problem("decode"), CPU)
    with pytest.raises(AssertionError, match="phase='prefill'"):
        replays(spec_of(TakesTheBoundForTheRows), problem("prefill"), CPU)


def test_mixed_steps_replay_declared_phases_only(
    spec_of: Callable[..., KernelSpec],
) -> None:
    built: list[str] = []

    class Built(TorchAttention):
        def __init__(self, given: AttentionProblem, *others: Any) -> None:
            built.append(given.phase)
            super().__init__(given, *others)

    replays(spec_of(Built), problem("prefill"), CPU)
    replays(spec_of(Built, phases=("prefill",)), problem("prefill"), CPU)
    assert built == ["prefill", "decode", "prefill"]


def test_replayed_steps_differ_and_share_prefixes() -> None:
    for wanted in (DECODES, CHUNKS):
        assert {
            len({each.rows().seq_lens for each in wanted if each.size == size})
            for size in {each.size for each in wanted}
        } <= {2, 3}
        assert any(each.num_shared for each in wanted)
    assert any(each.num_shared and each.decodes and each.chunks for each in CHUNKS)


def test_cases_without_a_device_are_counted(
    spec_of: Callable[..., KernelSpec],
) -> None:
    def ask(spec: KernelSpec) -> None:
        getattr(type("Mine", (KernelConformance,), {"spec": spec})(), ASK)()

    with pytest.raises(SkipTest, match=r"^\d+ cells need a device sm990 or newer, for graphs$"):
        ask(spec_of(TorchAttention))
    with pytest.raises(
        SkipTest, match=r"^\d+ cells need .* and the module no_such_library, for graphs$"
    ):
        ask(replace(spec_of(SpendsItsPlan), requires=("no_such_library",)))
    with pytest.raises(AssertionError, match="a captured step replayed"):
        ask(spec_of(SpendsItsPlan))
    with pytest.raises(SkipTest, match="declares no device that has graphs"):
        ask(spec_of(TorchAttention, platforms=("cpu",)))
    with pytest.raises(SkipTest, match="does not claim"):
        ask(spec_of(TorchAttention, features=frozenset()))
