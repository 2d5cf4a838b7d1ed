"""The conformance kit catches kernels with one fault each, and passes correct kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest import SkipTest

import pytest
import torch
from tokenspeed_testing.conformance import is_defined
from tokenspeed_testing.kernel import KernelConformance
from torch import Tensor
from torch.nn import functional

from tokenspeed_core.api import (
    DOTS,
    AttentionProblem,
    AttentionStep,
    AxisLimit,
    Capability,
    OpContract,
)
from tokenspeed_core.api.kernels import PlatformInfo
from tokenspeed_core.api.ops import common_ops
from tokenspeed_core.kernels import select
from tokenspeed_core.kernels.plan import Reason
from tokenspeed_kernels.reference.attention import TorchAttention
from tokenspeed_kernels.reference.cache import write_kv
from tokenspeed_kernels.reference.moe import moe_experts, moe_route
from tokenspeed_kernels.reference.rope import rope
from tokenspeed_kernels.reference.sampling import greedy

Suite = Callable[..., KernelConformance]
Kernel = Callable[..., Any]
IN_GRAPHS = {
    "platforms": ("cpu", "cuda"),
    "features": frozenset({"graph_safe"}),
    "min_compute_capability": (99, 0),
}
INVARIANT = {"features": frozenset({"batch_invariant"})}
SMALL = {"head_sizes": (16,), "block_sizes": (8,), "kv_dtypes": ("float32", "bfloat16")}
AGREES = "test_agrees_with_reference"
CASES = "test_declared_cases_run"
LARGE = "test_large_steps_agree_with_the_reference"
MANY = "test_many_rows_agree_with_the_reference"
BOUNDARIES = "test_open_axes_hold_at_their_boundaries"
LIMITS = "test_values_beyond_limits_are_refused"
ROWS = "test_batch_invariance"
GRAPHS = "test_cuda_graph_replay"


def silu_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up


def always(kernel: Kernel) -> Kernel:
    """Return a factory that gives every problem the same kernel."""
    return lambda problem: kernel


def wrong_in_bfloat16(problem: Any) -> Kernel:
    if problem["dtype"] != "bfloat16":
        return functional.linear
    return lambda x, weight, bias: functional.linear(
        x.to(torch.float8_e4m3fn).to(x.dtype), weight, bias
    )


def synchronizes_with_item(x: Tensor) -> Tensor:
    return x if x.numel() and x.abs().max().item() > 1e30 else silu_mul(x)


def synchronizes_with_tolist(x: Tensor) -> Tensor:
    return silu_mul(x) if len(x[:1].tolist()) < 2 else x


def indexes_by_mask(x: Tensor) -> Tensor:
    assert len(x[x[:, 0] > 1e9]) == 0
    return silu_mul(x)


class SynchronizesInForward(TorchAttention):
    def forward(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor) -> None:
        super().forward(q + (q.sum() > 1e30).item(), k_cache, v_cache, out)


def is_not_deterministic(problem: Any) -> Kernel:
    calls: list[int] = []

    def kernel(x: Tensor) -> Tensor:
        calls.append(1)
        return silu_mul(x) * (1 + 1e-6 * (len(calls) % 4 == 0))

    return kernel


def changes_the_first_row(x: Tensor) -> Tensor:
    y = silu_mul(x)
    y[: len(x) > 1] *= 1 + 1e-6
    return y


def changes_with_many_rows(x: Tensor) -> Tensor:
    return silu_mul(x) * (1 + 1e-6 * (len(x) > 64))


class ChangesTheFirstRow(TorchAttention):
    def forward(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor) -> None:
        super().forward(q, k_cache, v_cache, out)
        out[0] *= 1 + 1e-6 * (len(q) > 12)


class ChangesWithManyRows(TorchAttention):
    def prepare(self, step: AttentionStep) -> None:
        super().prepare(step)
        self.num_rows = step.num_rows

    def forward(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor) -> None:
        super().forward(q, k_cache, v_cache, out)
        out *= 1 + 1e-6 * (self.num_rows > 7)


class RowByRow:
    """A batch-invariant backend: each row is computed alone."""

    def __init__(self, *given: Any) -> None:
        self.given, self.rows = given, list[tuple[TorchAttention, int, int]]()

    def prepare(self, step: AttentionStep) -> None:
        self.rows = []
        for row, (first, last) in enumerate(pairwise(step.query_start.tolist())):
            length = int(step.seq_lens[row])
            self.rows.append((TorchAttention(*self.given), first, last))
            self.rows[-1][0].prepare(
                replace(
                    step,
                    num_rows=1,
                    num_tokens=last - first,
                    max_num_query=last - first,
                    max_seq_len=length,
                    query_start=step.query_start[row : row + 2] - first,
                    seq_lens=step.seq_lens[row : row + 1],
                    block_table=step.block_table[row : row + 1],
                    host_query_start=(0, last - first),
                    host_seq_lens=(length,),
                )
            )

    def forward(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor) -> None:
        for kernel, first, last in self.rows:
            kernel.forward(q[first:last], k_cache, v_cache, out[first:last])


def adds_uninitialized_memory(x: Tensor) -> Tensor:
    return silu_mul(x) + torch.empty(1, dtype=x.dtype) * 0


def reads_past_its_rows(x: Tensor) -> Tensor:
    if not x.numel():
        return silu_mul(x)
    beyond = x.as_strided((1, x.shape[1]), x.stride(), x.storage_offset() + len(x) * x.stride(0))
    return silu_mul(x) + silu_mul(beyond) * 0


def memory_after(tensor: Tensor) -> Tensor:
    """Return the memory after the last element of a tensor."""
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    end = tensor.storage_offset() + sum((size - 1) * stride for size, stride in strides) + 1
    left = tensor.untyped_storage().nbytes() // tensor.element_size() - end
    return tensor.as_strided((left,), (1,), end)


def writes_past_its_rows(problem: Any) -> Kernel:
    def kernel(q: Tensor, *others: Any) -> None:
        rope(problem)(q, *others)
        if len(q):
            memory_after(q)[:4] = 0

    return kernel


def writes_between_its_blocks(problem: Any) -> Kernel:
    def kernel(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        write_kv(problem)(k, v, k_cache, v_cache, slots)
        other_layer = k_cache.storage_offset() - k_cache[0].numel()
        k_cache.as_strided(k_cache.shape, k_cache.stride(), other_layer)[-1] = 1

    return kernel


class WritesPastItsRows(TorchAttention):
    def forward(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor) -> None:
        super().forward(q, k_cache, v_cache, out)
        memory_after(out).zero_()


class WritesTheCache(TorchAttention):
    def forward(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor) -> None:
        super().forward(q, k_cache, v_cache, out)
        k_cache.nan_to_num_()


class ClearsTheTable(TorchAttention):
    def prepare(self, step: AttentionStep) -> None:
        super().prepare(step)
        step.block_table.clamp_(0)


class IgnoresTheBlockSize(TorchAttention):
    def __init__(self, problem: AttentionProblem, *others: Any) -> None:
        super().__init__(replace(problem, block_size=16), *others)


class IgnoresTheScale(TorchAttention):
    def __init__(self, problem: AttentionProblem, *others: Any) -> None:
        super().__init__(replace(problem, scale=problem.head_size**-0.5), *others)


def stops_after(num_keys: int) -> type[TorchAttention]:
    """Return a backend that ignores keys beyond the first `num_keys` of a row."""

    class StopsEarly(TorchAttention):
        def prepare(self, step: AttentionStep) -> None:
            is_long = step.seq_lens > num_keys
            lens = torch.where(is_long, torch.full_like(step.seq_lens, num_keys), step.seq_lens)
            super().prepare(replace(step, seq_lens=lens, host_seq_lens=tuple(lens.tolist())))

    return StopsEarly


def wrong_when(is_wrong: Callable[[AttentionStep], bool]) -> type[TorchAttention]:
    """Return a backend that doubles its output in some steps."""

    class Wrong(TorchAttention):
        def prepare(self, step: AttentionStep) -> None:
            super().prepare(step)
            self.factor = 2 if is_wrong(step) else 1

        def forward(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor) -> None:
            super().forward(q, k_cache, v_cache, out)
            out *= self.factor

    return Wrong


def widest_chunk(step: AttentionStep) -> int:
    return int((step.query_start[1:] - step.query_start[:-1]).max())


def has_chunk_after(step: AttentionStep, num_context: int) -> bool:
    num_query = step.query_start[1:] - step.query_start[:-1]
    return bool(((num_query > 300) & (step.seq_lens - num_query > num_context)).any())


class OverflowsInSoftmax(TorchAttention):
    """Computes the softmax without subtracting the maximum."""

    def forward(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor) -> None:
        super().forward(q, k_cache, v_cache, out)
        out[q.float().norm(dim=-1).max(dim=-1).values > 100] = float("inf")


class ServesOneLayer(TorchAttention):
    def forward(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor) -> None:
        super().forward(q, k_cache, v_cache, out)
        self._batches = []


def reuses_its_result(problem: Any) -> Kernel:
    kept: dict[Any, Tensor] = {}

    def kernel(x: Tensor) -> Tensor:
        y = silu_mul(x)
        return kept.setdefault(y.shape, y).copy_(y)

    return kernel


def caches_by_address(problem: Any) -> Kernel:
    kept: dict[Any, Tensor] = {}
    return lambda x: kept.setdefault((x.data_ptr(), x.shape, x.stride()), silu_mul(x)).clone()


def needs_multiples_of_8(problem: Any) -> Kernel:
    if problem["in_size"] % 8:
        raise RuntimeError("multiples of 8")
    return functional.linear


def reads_65536_logits(problem: Any) -> Kernel:
    return lambda logits: greedy(problem)(logits[:, : 1 << 16])


def takes_256_experts(problem: Any) -> Kernel:
    if problem["num_experts"] > 256:
        raise RuntimeError("256 at most")
    return moe_route(problem)


def prefers_later_experts(*, has_groups: bool) -> Callable[[Any], Kernel]:
    """Return kernels that choose the later of two experts or groups with tied scores, if they have a bias."""

    def factory(problem: Any) -> Kernel:
        route = moe_route(problem)
        if not problem["has_bias"] or (problem["num_groups"] > 1) != has_groups:
            return route

        def later(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
            weights, ids = route(logits.flip(1), bias.flip(0))
            return weights, problem["num_experts"] - 1 - ids

        return later

    return factory


def bounded(**bounds: Callable[[Any], bool]) -> type[TorchAttention]:
    """Return a backend that refuses problems with values out of bounds."""

    class Bounded(TorchAttention):
        def __init__(self, problem: AttentionProblem, *others: Any) -> None:
            for axis, is_within in bounds.items():
                if not is_within(getattr(problem, axis)):
                    raise ValueError(f"{axis} is out of bounds")
            super().__init__(problem, *others)

    return Bounded


class ReversesExperts:
    """Prepares weights by reversing the order of the experts."""

    def __init__(self, problem: Any) -> None:
        self._experts = moe_experts(problem)

    def prepare_weights(self, *weights: Tensor) -> None:
        for weight in weights:
            weight.copy_(weight.flip(0))

    def __call__(self, x: Tensor, gate_up: Tensor, down: Tensor, *routes: Tensor) -> Tensor:
        return self._experts(x, gate_up.flip(0), down.flip(0), *routes)


def writes_its_input(x: Tensor) -> Tensor:
    y = silu_mul(x)
    x.zero_()
    return y


def skips_the_last_row(x: Tensor) -> Tensor:
    y = x.new_empty(x.shape[0], x.shape[1] // 2)
    y[:-1] = silu_mul(x)[:-1]
    return y


def ignores_strides(x: Tensor) -> Tensor:
    return silu_mul(x.as_strided(x.shape, (x.shape[1], 1)))


def swaps_the_halves(x: Tensor) -> Tensor:
    return silu_mul(x.roll(x.shape[1] // 2, dims=1))


def rounds_to_bfloat16(x: Tensor) -> Tensor:
    return silu_mul(x.to(torch.bfloat16)).to(x.dtype)


def fails_in_bfloat16(problem: Any) -> Kernel:
    if problem["dtype"] != "float32":
        raise NotImplementedError("float32 only")
    return functional.linear


def raises(problem: Any) -> Kernel:
    raise SystemError("driver")


class FailsForOnePair(TorchAttention):
    def __init__(self, problem: AttentionProblem, *others: Any) -> None:
        if problem.head_size == 96 and problem.block_size == 8:
            raise RuntimeError("no such tile")
        super().__init__(problem, *others)


class ReadsPastTheRow(TorchAttention):
    """Multiplies unwritten values by a probability of zero, which is NaN if they are NaN."""

    def prepare(self, step: AttentionStep) -> None:
        super().prepare(step)
        self._batches = [replace(batch, unwritten=None) for batch in self._batches]


class IgnoresTheWindow(TorchAttention):
    def __init__(self, problem: AttentionProblem, *others: Any) -> None:
        super().__init__(replace(problem, window=None), *others)


class IgnoresTheSoftCap(TorchAttention):
    def __init__(self, problem: AttentionProblem, *others: Any) -> None:
        super().__init__(replace(problem, soft_cap=None), *others)


class IgnoresTheSinks(TorchAttention):
    def __init__(self, problem: AttentionProblem, *others: Any) -> None:
        super().__init__(replace(problem, has_sinks=False), *others)

    def forward(self, *given: Tensor, sinks: Tensor | None = None) -> None:  # type: ignore[override]
        super().forward(*given)


class KeepsTheFirstSinks(TorchAttention):
    """Uses the sinks of the first layer for all layers."""

    kept: Tensor | None = None

    def forward(self, *given: Tensor, sinks: Tensor | None = None) -> None:  # type: ignore[override]
        self.kept = sinks if self.kept is None else self.kept
        super().forward(*given, sinks=self.kept)


class LeavesPaddingRows(TorchAttention):
    def prepare(self, step: AttentionStep) -> None:
        super().prepare(step)
        self._idle = []


class NoLimit(AxisLimit):
    """A limit that refuses nothing."""

    __slots__ = ()

    def refusal(self, value: int) -> str | None:
        return None


FAULTS: tuple[tuple[str, Any, dict[str, Any], str, str], ...] = (
    ("linear", wrong_in_bfloat16, {}, CASES, "bfloat16.*not close"),
    ("linear", fails_in_bfloat16, {}, CASES, "bfloat16.*NotImplementedError"),
    ("linear", raises, {}, CASES, "SystemError: driver"),
    ("attention", FailsForOnePair, {}, CASES, r"head_size': 96.* no such tile"),
    ("silu_mul", always(writes_its_input), {}, AGREES, "it wrote into x"),
    ("silu_mul", always(skips_the_last_row), {}, AGREES, "nan"),
    ("silu_mul", always(ignores_strides), {}, AGREES, "strided"),
    ("silu_mul", always(swaps_the_halves), {}, AGREES, "Mismatched elements"),
    ("silu_mul", always(rounds_to_bfloat16), {}, AGREES, "Mismatched elements"),
    ("moe_route", prefers_later_experts(has_groups=False), {}, AGREES, "'num_experts': 24"),
    ("moe_route", prefers_later_experts(has_groups=True), {}, AGREES, "'num_experts': 96"),
    ("moe_experts", ReversesExperts, {}, AGREES, "gate_up of an expert depend on others"),
    ("attention", ReadsPastTheRow, SMALL, AGREES, "num_heads="),
    ("attention", LeavesPaddingRows, SMALL, AGREES, "num_heads="),
    (
        "attention",
        IgnoresTheWindow,
        {**SMALL, "features": frozenset({"window"})},
        AGREES,
        "num_heads=",
    ),
    (
        "attention",
        IgnoresTheSoftCap,
        {**SMALL, "features": frozenset({"soft_cap"})},
        AGREES,
        "num_heads=",
    ),
    (
        "attention",
        IgnoresTheSinks,
        {**SMALL, "features": frozenset({"sinks"})},
        AGREES,
        "num_heads=",
    ),
    (
        "attention",
        KeepsTheFirstSinks,
        {**SMALL, "features": frozenset({"sinks"})},
        AGREES,
        "interleaved layers",
    ),
    (
        "linear",
        always(functional.linear),
        {"limits": (AxisLimit("hidden_size", 1, 64),)},
        LIMITS,
        "'hidden_size'",
    ),
    (
        "silu_mul",
        always(synchronizes_with_item),
        IN_GRAPHS,
        GRAPHS,
        r"graph_safe.* on the host: item at test_conformance_catches_faults.py:\d+",
    ),
    (
        "silu_mul",
        always(synchronizes_with_tolist),
        IN_GRAPHS,
        GRAPHS,
        "tolist at test_conformance_catches_faults",
    ),
    (
        "silu_mul",
        always(indexes_by_mask),
        IN_GRAPHS,
        GRAPHS,
        "__getitem__ at test_conformance_catches_faults",
    ),
    (
        "attention",
        SynchronizesInForward,
        {**IN_GRAPHS, **SMALL},
        GRAPHS,
        "phase=.*item at test_conformance_catches_faults",
    ),
    ("silu_mul", is_not_deterministic, INVARIANT, ROWS, "repeated calls gave different bits"),
    (
        "silu_mul",
        always(changes_the_first_row),
        INVARIANT,
        ROWS,
        "a row depends on the others, of 33",
    ),
    (
        "silu_mul",
        always(changes_with_many_rows),
        INVARIANT,
        ROWS,
        "a row depends on the others, of 130",
    ),
    ("attention", ChangesTheFirstRow, {**INVARIANT, **SMALL}, ROWS, "a row depends on the others"),
    ("attention", ChangesWithManyRows, {**INVARIANT, **SMALL}, ROWS, "a row depends on the others"),
    ("silu_mul", always(adds_uninitialized_memory), {}, AGREES, "nan"),
    ("silu_mul", always(reads_past_its_rows), {}, AGREES, "nan"),
    ("rope", writes_past_its_rows, {}, AGREES, "it wrote beyond q"),
    (
        "write_kv",
        writes_between_its_blocks,
        {"kv_dtypes": ("float32",)},
        AGREES,
        "it wrote beyond k_cache and v_cache",
    ),
    ("attention", WritesPastItsRows, SMALL, AGREES, "it wrote beyond out"),
    ("attention", WritesTheCache, SMALL, AGREES, "it wrote into k_cache"),
    ("attention", ClearsTheTable, SMALL, AGREES, "it wrote into block_table"),
    ("attention", IgnoresTheBlockSize, {"block_sizes": (16, 32)}, CASES, "'block_size': 32"),
    ("attention", stops_after(1024), SMALL, LARGE, "long contexts"),
    ("attention", stops_after(2048), SMALL, LARGE, "long contexts"),
    ("attention", stops_after(8192), SMALL, LARGE, "long contexts"),
    ("attention", stops_after(32_768), SMALL, LARGE, "long contexts"),
    ("attention", wrong_when(lambda step: widest_chunk(step) >= 512), SMALL, LARGE, "wide chunks"),
    ("attention", wrong_when(lambda step: has_chunk_after(step, 256)), SMALL, LARGE, "wide chunks"),
    ("attention", wrong_when(lambda step: 64 <= step.num_rows < 256), SMALL, LARGE, "70 rows"),
    ("attention", wrong_when(lambda step: step.num_rows >= 256), SMALL, LARGE, "300 rows"),
    ("attention", bounded(block_size=lambda size: size < 256), {}, BOUNDARIES, "'block_size': 256"),
    ("attention", bounded(num_heads=lambda num: num < 64), {}, BOUNDARIES, "'num_heads': 64"),
    (
        "attention",
        wrong_when(lambda step: int(step.block_table.max()) >= 4096),
        SMALL,
        LARGE,
        "long contexts|high block ids",
    ),
    ("attention", OverflowsInSoftmax, SMALL, LARGE, "large scores"),
    ("silu_mul", always(lambda x: silu_mul(x) * (1 + (len(x) > 256))), {}, MANY, "300 rows"),
    ("attention", ServesOneLayer, SMALL, AGREES, "interleaved layers"),
    (
        "silu_mul",
        reuses_its_result,
        {},
        AGREES,
        "a second call changed the first result",
    ),
    ("silu_mul", caches_by_address, {}, AGREES, "called again with other values"),
    (
        "linear",
        needs_multiples_of_8,
        {},
        BOUNDARIES,
        "does not exclude .*'in_size': 1.*multiples of 8",
    ),
    ("greedy", reads_65536_logits, {}, BOUNDARIES, "'vocab_size': 262145"),
    ("moe_route", takes_256_experts, {}, BOUNDARIES, "does not exclude .*'num_experts': 257"),
    ("attention", bounded(head_size=lambda size: size <= 256), {}, BOUNDARIES, "'head_size': 512"),
    (
        "attention",
        bounded(block_size=lambda size: size & (size - 1) == 0),
        {},
        BOUNDARIES,
        "'block_size': 24",
    ),
    (
        "attention",
        bounded(kv_dtype=lambda kind: "float8" not in kind),
        {},
        BOUNDARIES,
        "'kv_dtype': 'float8_e4m3fn'",
    ),
    ("attention", bounded(num_heads=lambda num: num <= 32), {}, BOUNDARIES, "'num_heads': 48"),
    (
        "attention",
        bounded(window=lambda size: size != 1),
        {"features": frozenset({"window"})},
        BOUNDARIES,
        "'window': 1,",
    ),
    ("attention", IgnoresTheScale, SMALL, BOUNDARIES, r"scale=0\.125.*not close"),
    (
        "linear",
        always(functional.linear),
        {"limits": (NoLimit("in_size", 64, 256),)},
        LIMITS,
        "in_size 63",
    ),
)


@pytest.mark.parametrize(
    ("op", "factory", "capability", "check", "message"),
    FAULTS,
    ids=[
        f"{fault[3].removeprefix('test_')[:20]}-{fault[0]}-{number}"
        for number, fault in enumerate(FAULTS)
    ],
)
def test_fault_is_caught(
    suite: Suite, op: str, factory: Any, capability: dict[str, Any], check: str, message: str
) -> None:
    with pytest.raises(AssertionError, match=f"(?s){message}"):
        getattr(suite(op, factory, **capability), check)()


@pytest.mark.parametrize(
    ("op", "factory", "capability"),
    [
        (
            "silu_mul",
            always(silu_mul),
            {**IN_GRAPHS, "features": frozenset({"graph_safe", "batch_invariant"})},
        ),
        ("linear", always(functional.linear), IN_GRAPHS),
        ("rope", rope, {}),
        ("greedy", greedy, {}),
        ("moe_route", moe_route, {}),
        ("write_kv", write_kv, {}),
        ("attention", TorchAttention, {}),
        pytest.param(
            "attention",
            TorchAttention,
            {**SMALL, "features": frozenset({"window"})},
            marks=pytest.mark.release,
        ),
        (
            "attention",
            TorchAttention,
            {**SMALL, "features": frozenset({"window", "soft_cap", "sinks"})},
        ),
        ("attention", RowByRow, {**SMALL, **INVARIANT}),
        ("linear", needs_multiples_of_8, {"limits": (AxisLimit("in_size", 8, multiple_of=8),)}),
        ("moe_route", takes_256_experts, {"limits": (AxisLimit("num_experts", 1, 256),)}),
        (
            "attention",
            bounded(head_size=lambda size: size <= 256),
            {"limits": (AxisLimit("head_size", 1, 256),)},
        ),
        (
            "attention",
            bounded(kv_dtype=lambda kind: "float8" not in kind),
            {"kv_dtypes": ("float32", "bfloat16")},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_correct_kernel_passes(
    suite: Suite, op: str, factory: Any, capability: dict[str, Any]
) -> None:
    kernel_suite = suite(op, factory, **capability)
    # The last kernels differ from those before them in their limits alone.
    is_bounded = "limits" in capability or "kv_dtypes" in capability
    every = (AGREES, CASES, LARGE, MANY, BOUNDARIES, LIMITS, ROWS, GRAPHS)
    for check in (CASES, LIMITS) if is_bounded else every:
        with nullcontext() if check not in (LARGE, MANY, ROWS, GRAPHS) else suppress(SkipTest):
            getattr(kernel_suite, check)()


def same(problem: Any) -> Kernel:
    return lambda x: x.clone()


def test_result_that_aliases_an_input_is_caught(suite: Suite) -> None:
    contract = OpContract(
        "same",
        "norm",
        "(x [T, N]) -> y [T, N]: x",
        {"size": "elements of a row, N"},
        f"{__name__}:same",
        "tokenspeed_kernels.inputs:silu_mul",
        DOTS,
        rows=("x",),
        cases=({"size": 24},),
    )
    for factory, is_caught in (
        (same, False),
        (always(lambda x: x), True),
        (always(lambda x: x[:]), True),
    ):
        kernel_suite = type("Mine", (type(suite("same", factory)),), {"contract": contract})()
        if is_caught:
            with pytest.raises(AssertionError, match="result 0 is in the memory of x"):
                getattr(kernel_suite, AGREES)()
        else:
            getattr(kernel_suite, AGREES)()


def test_selection_that_ignores_a_limit_is_caught(
    suite: Suite, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel_suite = suite(
        "linear", always(functional.linear), limits=(AxisLimit("in_size", 8, multiple_of=8),)
    )
    getattr(kernel_suite, LIMITS)()
    monkeypatch.setattr(select, "problem_refusals", lambda *given: ())
    with pytest.raises(AssertionError, match="in_size 17"):
        getattr(kernel_suite, LIMITS)()
    monkeypatch.setattr(select, "problem_refusals", lambda *given: (Reason("the moon is full"),))
    with pytest.raises(AssertionError, match=r"in_size 17 .*the moon is full"):
        getattr(kernel_suite, LIMITS)()


def test_selection_that_ignores_compute_capability_is_caught(
    suite: Suite, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel_suite = suite("linear", always(functional.linear), **IN_GRAPHS)

    def by_kind_only(capability: Capability, platform: PlatformInfo) -> Iterable[Reason]:
        return (
            ()
            if platform.kind in capability.platforms
            else (Reason("device none is not supported"),)
        )

    monkeypatch.setattr(select, "hardware_refusals", by_kind_only)
    with pytest.raises(AssertionError, match=r"compute capability 98\.9"):
        getattr(kernel_suite, LIMITS)()


def test_kernel_that_does_not_load_is_caught(
    suite: Suite,
) -> None:
    kernel_suite = suite("linear", always(functional.linear), dtypes=("float32",))
    kernel_suite.spec = replace(kernel_suite.spec, load="no_such_module:factory")  # type: ignore[misc]
    with pytest.raises(
        AssertionError,
        match="ModuleNotFoundError",
    ):
        getattr(kernel_suite, LIMITS)()


def broken_inputs(problem: Any, *given: Any) -> dict[str, Any]:
    if problem["size"] > 16:
        raise ValueError("the op has no such size")
    raise KeyError("a fault of the generator")


def test_fault_of_an_input_generator_is_not_hidden() -> None:
    contract = replace(common_ops()["greedy"], inputs=f"{__name__}:broken_inputs")
    assert not is_defined(contract, {"size": 17}, 1, torch.device("cpu"))
    with pytest.raises(KeyError):
        is_defined(contract, {"size": 16}, 1, torch.device("cpu"))
