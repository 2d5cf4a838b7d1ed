"""The conformance kit catches attention backends that fail when captured steps are replayed; here on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import SkipTest

import pytest
import torch
from tokenspeed_testing.kernel import KernelConformance
from tokenspeed_testing.replays import CHUNKS, DECODES, replays
from torch import Tensor

from tokenspeed_core.api import AttentionProblem, AttentionStep, KernelSpec
from tokenspeed_kernels.reference.attention import TorchAttention

CPU = torch.device("cpu")
CAPABILITY = {
    "platforms": ("cpu", "cuda"),
    "dtypes": ("float32",),
    "min_compute_capability": (99, 0),
    "head_sizes": (16,),
    "block_sizes": (8,),
    "features": frozenset({"graph_safe"}),
}


def problem(phase: str) -> AttentionProblem:
    return AttentionProblem(phase, 4, 2, 16, "float32", "float32", 8, 0.25, None)


@pytest.fixture
def spec_of(suite: Callable[..., KernelConformance]) -> Callable[..., KernelSpec]:
    """Return a function that makes the spec of a backend class, with changes to the capability."""

    def make(backend: Any, **capability: Any) -> KernelSpec:
        return suite("attention", backend, **{**CAPABILITY, **capability}).spec

    return make


class CachesItsPlan(TorchAttention):
    """Plans once per step size, at capture."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._seen: dict[int, list[Any]] = {}

    def prepare(self, step: AttentionStep) -> None:
        super().prepare(step)
        self._batches = self._seen.setdefault(step.num_rows, self._batches)


class CachesTheBlockTable(TorchAttention):
    """Updates the lengths, but keeps the first block table of each step size."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._tables: dict[int, Tensor] = {}

    def prepare(self, step: AttentionStep) -> None:
        table = self._tables.get(step.num_rows)
        if table is None and bool(step.seq_lens.any()):
            table = self._tables[step.num_rows] = step.block_table.clone()
        super().prepare(step if table is None else replace(step, block_table=table.clamp(0)))


class IgnoresTheNumberOfTokens(TorchAttention):
    """Uses the largest possible number of query tokens."""

    def prepare(self, step: AttentionStep) -> None:
        start = step.query_start.clone()
        start[-1] = step.num_tokens
        super().prepare(replace(step, query_start=start))


class ServesOneLayer(TorchAttention):
    """Drops the plan after the first layer."""

    def forward(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor) -> None:
        super().forward(q, k_cache, v_cache, out)
        self._batches = []


class LeavesPaddingRows(TorchAttention):
    def prepare(self, step: AttentionStep) -> None:
        super().prepare(step)
        self._idle = []


class NeedsHostLengths(TorchAttention):
    def prepare(self, step: AttentionStep) -> None:
        assert step.host_seq_lens is not None, "no lengths on the host"
        super().prepare(step)


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_correct_backend_replays(spec_of: Callable[..., KernelSpec], phase: str) -> None:
    replays(spec_of(TorchAttention), problem(phase), CPU)


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize(
    "wrong",
    [CachesItsPlan, CachesTheBlockTable, ServesOneLayer, NeedsHostLengths],
    ids=lambda wrong: str(wrong.__name__),
)
def test_stale_state_between_replays_is_caught(
    spec_of: Callable[..., KernelSpec], wrong: Any, phase: str
) -> None:
    with pytest.raises(AssertionError):
        replays(spec_of(wrong), problem(phase), CPU)


def test_unwritten_padding_is_caught(spec_of: Callable[..., KernelSpec]) -> None:
    with pytest.raises(AssertionError, match="NaN"):
        replays(spec_of(LeavesPaddingRows), problem("decode"), CPU)
    with pytest.raises(AssertionError, match="phase='prefill'"):
        replays(spec_of(IgnoresTheNumberOfTokens), problem("prefill"), CPU)


def test_mixed_steps_replay_declared_phases_only(
    spec_of: Callable[..., KernelSpec],
) -> None:
    phases: list[str] = []

    class Recording(TorchAttention):
        def __init__(self, problem: AttentionProblem, *others: Any) -> None:
            phases.append(problem.phase)
            super().__init__(problem, *others)

    replays(spec_of(Recording), problem("prefill"), CPU)
    replays(spec_of(Recording, phases=("prefill",)), problem("prefill"), CPU)
    assert phases == ["prefill", "decode", "prefill"]


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
    def check(spec: KernelSpec) -> None:
        type("Suite", (KernelConformance,), {"spec": spec})().test_cuda_graph_replay()

    with pytest.raises(SkipTest, match=r"^\d+ .* sm990 or newer"):
        check(spec_of(TorchAttention))
    with pytest.raises(SkipTest, match=r"^\d+ .* no_such_library"):
        check(replace(spec_of(ServesOneLayer), requires=("no_such_library",)))
    with pytest.raises(AssertionError, match="replayed"):
        check(spec_of(ServesOneLayer))
    with pytest.raises(SkipTest, match="graphs"):
        check(spec_of(TorchAttention, platforms=("cpu",)))
    with pytest.raises(SkipTest, match="graph_safe"):
        check(spec_of(TorchAttention, features=frozenset()))
