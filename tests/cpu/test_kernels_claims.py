"""The cases that the conformance kit derives from a spec, and the cases that it skips."""

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

from tokenspeed_core.api import AxisLimit, Capability, KernelSpec
from tokenspeed_core.api.ops import common_ops
from tokenspeed_kernels import descriptors

Suite = Callable[..., KernelConformance]


def linear(problem: Any) -> Callable[..., Tensor]:
    return functional.linear


def test_kernel_of_an_absent_device_is_skipped(suite: Suite) -> None:
    with pytest.raises(SkipTest, match="npu"):
        suite("linear", linear, platforms=("npu",)).test_declared_cases_run()


def test_batch_invariance_is_skipped_unless_declared(suite: Suite) -> None:
    with pytest.raises(SkipTest, match="batch_invariant"):
        suite("linear", linear).test_batch_invariance()


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
    values = {value for value, _ in beyond(spec, common_ops()["attention"])}
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
        "the feature window",
        "the feature soft_cap",
        "the feature sinks",
    } <= values
    assert not {"head_size 64", "phase decode", "dtype float32"} & values


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
    spec = descriptors.TORCH_ATTENTION[0]
    contract = contract_of(spec)
    pairs, every = (list(cases(spec, contract, pairs_only=only)) for only in (True, False))
    assert len(pairs) < 60 < 400 < len(every)
    assert all(problem in every for problem in pairs)


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
    kernel_suite = suite(
        "linear",
        linear,
        platforms=("cuda",),
        min_compute_capability=low,
        max_compute_capability=high,
    )
    if named == "a device cuda" and torch.cuda.is_available():
        kernel_suite.test_declared_hardware_is_present()
        return
    num_cases = sum(
        1 for _ in cases(kernel_suite.spec, contract_of(kernel_suite.spec), pairs_only=False)
    )
    assert num_cases > 2
    with pytest.raises(SkipTest, match=rf"^{num_cases} \w+ need {named}$"):
        kernel_suite.test_declared_hardware_is_present()


def test_skip_names_the_missing_library(suite: Suite) -> None:
    kernel_suite = suite("linear", linear)
    kernel_suite.test_declared_hardware_is_present()
    lacking = type(
        "Lacking",
        (KernelConformance,),
        {"spec": replace(kernel_suite.spec, requires=("no_such_library",))},
    )()
    with pytest.raises(SkipTest, match="no_such_library"):
        lacking.test_declared_hardware_is_present()
