"""A spec that says more than its kernel does is found out, cell by cell; and what it does not say is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, product
from typing import Any
from unittest import SkipTest

import pytest
import torch
from tokenspeed_testing.cases import beyond, cases, covering, outside
from tokenspeed_testing.kernel import KernelConformance
from tokenspeed_testing.shapes import contract_of
from torch import Tensor
from torch.nn import functional

from tokenspeed_core.api import AttentionLimits, AttentionProblem, AxisLimit, Capability, KernelSpec
from tokenspeed_core.api.ops import common_ops
from tokenspeed_kernels import descriptors
from tokenspeed_kernels.reference.attention import TorchAttention

Suite = Callable[..., KernelConformance]


def product_of(problem: Any) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    return functional.linear


def knows_float32_alone(problem: Any) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    if problem["dtype"] != "float32":
        raise NotImplementedError("float32 only")
    return functional.linear


def calls_differ(problem: Any) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    calls: list[int] = []

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        calls.append(1)
        return functional.linear(x, weight, bias) + 1e-7 * len(calls)

    return linear


class OneHeadSize(TorchAttention):
    def __init__(
        self, problem: AttentionProblem, limits: AttentionLimits, device: torch.device
    ) -> None:
        if problem.head_size == 96 and problem.block_size == 8:
            raise RuntimeError("no such tile")
        super().__init__(problem, limits, device)


class LooksAtOtherRows(TorchAttention):
    def forward(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor) -> None:
        super().forward(q, k_cache, v_cache, out)
        out += 1e-6 * len(q)


def test_declared_dtype_that_fails_is_caught(suite: Suite) -> None:
    with pytest.raises(
        AssertionError, match=r"it declares .*bfloat16.* and fails on cpu: NotImplementedError"
    ):
        suite("linear", knows_float32_alone).test_declared_cases_run()
    suite("linear", knows_float32_alone, dtypes=("float32",)).test_declared_cases_run()


def test_declared_pair_of_values_that_fails_is_caught(suite: Suite) -> None:
    with pytest.raises(AssertionError, match=r"head_size': 96.* no such tile"):
        suite("attention", OneHeadSize).test_declared_cases_run()


def test_batch_invariance_is_checked_bitwise(suite: Suite) -> None:
    claim = {"features": frozenset({"batch_invariant"}), "dtypes": ("float32",)}
    ask = "test_batch_invariance"
    with pytest.raises(AssertionError, match="other bits another time"):
        getattr(suite("linear", calls_differ, **claim), ask)()
    with pytest.raises(AssertionError, match="a row depends on the others"):
        getattr(suite("attention", LooksAtOtherRows, **claim), ask)()
    with pytest.raises(SkipTest, match="does not claim"):
        getattr(suite("linear", product_of), ask)()


def test_limit_on_an_unknown_axis_is_caught(suite: Suite) -> None:
    odd = suite("linear", product_of, limits=(AxisLimit("hidden_size", 1, 64),))
    with pytest.raises(
        AssertionError, match="bounds the axis 'hidden_size', which op 'linear' has not"
    ):
        odd.test_values_beyond_limits_are_refused()


def test_kernel_of_an_absent_device_is_skipped(suite: Suite) -> None:
    with pytest.raises(SkipTest, match="this machine lacks a device npu"):
        suite("linear", product_of, platforms=("npu",)).test_declared_cases_run()


def test_one_value_beyond_each_limit_is_tried() -> None:
    capability = Capability(
        ("cpu",),
        ("float32",),
        kv_dtypes=("float32",),
        head_sizes=(64, 128),
        block_sizes=(16,),
        phases=("decode",),
        limits=(AxisLimit("num_heads", 4, 16, multiple_of=2),),
    )
    spec = KernelSpec("attention", "acme/mine", capability, load="m:f")
    tried = {what for what, _ in beyond(spec, common_ops()["attention"])}
    assert {
        "num_heads 2",
        "num_heads 18",
        "num_heads 7",
        "head_size 63",
        "head_size 129",
        "block_size 17",
        "phase prefill",
        "dtype bfloat16",
        "kv_dtype float16",
        "window 20",
    } <= tried
    assert not {"head_size 64", "phase decode", "dtype float32"} & tried


@pytest.mark.parametrize(
    "limit", [AxisLimit("n", 1), AxisLimit("n", 16, 64), AxisLimit("n", 5, 90, multiple_of=8)]
)
def test_values_outside_a_limit_are_refused(limit: AxisLimit) -> None:
    assert all(limit.refusal(value) for value in outside(limit))


def test_covering_has_every_pair_in_few_rows() -> None:
    axes = {"a": "xyz", "b": "12", "c": "pqrs", "d": "uv"}
    rows = list(covering(axes))
    for first, second in combinations(axes, 2):
        assert {(row[first], row[second]) for row in rows} == set(
            product(axes[first], axes[second])
        )
    assert len(rows) <= 16


def test_cpu_runs_every_pair_of_values() -> None:
    (spec,) = descriptors.TORCH_ATTENTION
    contract = contract_of(spec)
    pairs, every = (list(cases(spec, contract, pairs_only=only)) for only in (True, False))
    assert len(pairs) < 60 < 400 < len(every)
    assert all(problem in every for problem in pairs)


def test_factory_that_raises_fails_its_case(suite: Suite) -> None:
    def raises(problem: Any) -> Any:
        raise SystemError("driver")

    with pytest.raises(AssertionError, match="SystemError: driver"):
        suite("linear", raises).test_declared_cases_run()


def test_limits_of_our_kernels_refuse_something() -> None:
    specs = [
        spec
        for specs in vars(descriptors).values()
        if isinstance(specs, tuple)
        for spec in specs
        if isinstance(spec, KernelSpec)
    ]
    assert len(specs) > 20
    for spec in specs:
        type(
            "Ours", (KernelConformance,), {"spec": replace(spec, requires=())}
        )().test_values_beyond_limits_are_refused()


@pytest.mark.parametrize(
    ("low", "high", "named"),
    [
        (None, None, "a device cuda"),
        ((42, 0), None, "a device sm420 or newer"),
        ((42, 0), (42, 0), "a device sm420"),
        ((42, 0), (42, 3), "a device sm420 to sm423"),
        (None, (1, 0), "a device sm10 or older"),
    ],
)
def test_skip_counts_the_cases_of_an_absent_device(
    suite: Suite, low: tuple[int, int] | None, high: tuple[int, int] | None, named: str
) -> None:
    mine = suite(
        "linear",
        product_of,
        platforms=("cuda",),
        min_compute_capability=low,
        max_compute_capability=high,
    )
    if named == "a device cuda" and torch.cuda.is_available():
        mine.test_declared_hardware_is_present()
        return
    num_cells = sum(1 for _ in cases(mine.spec, contract_of(mine.spec), pairs_only=False))
    assert num_cells > 2
    with pytest.raises(SkipTest, match=f"^{num_cells} cells need {named}$"):
        mine.test_declared_hardware_is_present()


def test_skip_names_the_missing_library(suite: Suite) -> None:
    mine = suite("linear", product_of)
    mine.test_declared_hardware_is_present()
    lacking = type(
        "Lacking", (KernelConformance,), {"spec": replace(mine.spec, requires=("no_such_library",))}
    )()
    with pytest.raises(SkipTest, match=r"^\d+ cells need the module no_such_library$"):
        lacking.test_declared_hardware_is_present()
