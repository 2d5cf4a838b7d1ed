"""An exception that a kernel raised names the kernel and the flag that selects another one."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tokenspeed_core.api.kernels import Capability, KernelSpec, PlatformInfo
from tokenspeed_core.kernels.error_attribution import attribute_error, no_finite_logits
from tokenspeed_core.kernels.installed import InstalledKernel
from tokenspeed_core.kernels.overrides import Override
from tokenspeed_core.kernels.plan import PlannedOp
from tokenspeed_core.kernels.select import Selector

ANYWHERE = Capability(("cpu",), ("float32",))
LOGITS = {"vocab_size": 64, "dtype": "float32"}


def greedy(problem: Any) -> Callable[[], None]:
    def run() -> None:
        json.loads("not JSON")  # raises in a library

    return run


class Sample:
    def forward(self) -> None:
        json.loads("not JSON")


def kernel(op: str, backend: str, load: str = "builtins:print") -> InstalledKernel:
    return InstalledKernel(KernelSpec(op, backend, ANYWHERE, load), f"dist-{backend}")


def plan(*overrides: Override) -> dict[str, PlannedOp]:
    kernels = [kernel("sample", "mine"), kernel("greedy", "mine"), kernel("greedy", "other")]
    selector = Selector(kernels, PlatformInfo("cpu"), overrides)
    for op in ("sample", "greedy"):
        selector.select(op, LOGITS)
    return {planned.op: planned for planned in selector.plan().ops}


def catch(call: Callable[[], object]) -> Exception:
    try:
        call()
    except ValueError as error:
        return error
    raise AssertionError("no exception")


@pytest.mark.parametrize("wrap", [lambda run: run, partial])
def test_function_that_raised_is_named(wrap: Callable[[Any], Any]) -> None:
    planned, run, sample = plan(), greedy(LOGITS), Sample()
    bound = [(sample, planned["sample"]), (wrap(run), planned["greedy"])]
    message = attribute_error(catch(run), bound)
    assert "greedy kernel mine of dist-mine" in message
    assert "--kernel-backend greedy=other" in message


def test_instance_that_raised_is_named() -> None:
    planned, first, second = plan(), Sample(), Sample()
    bound = [(first, planned["greedy"]), (second, planned["sample"])]
    message = attribute_error(catch(second.forward), bound)
    assert "sample kernel mine of dist-mine" in message
    assert "No other backend fits" in message


@pytest.mark.parametrize(
    ("override", "flag"),
    [
        (Override("greedy", ("mine",), "--kernel-backend greedy"), "--kernel-backend greedy=other"),
        (Override("greedy", ("mine",), "--x-backend"), "--x-backend other"),
    ],
)
def test_hint_uses_the_flag_that_selected_the_kernel(override: Override, flag: str) -> None:
    run = greedy(LOGITS)
    assert flag in attribute_error(catch(run), [(run, plan(override)["greedy"])])


def test_other_exceptions_are_not_attributed() -> None:
    bound = [(greedy(LOGITS), plan()["greedy"])]
    assert attribute_error(catch(lambda: int("x")), bound) == ""
    assert attribute_error(ValueError("never raised"), bound) == ""


def test_logits_that_are_not_finite_name_third_party_kernels() -> None:
    selector = Selector([kernel("greedy", "mine")], PlatformInfo("cpu"))
    selector.select("greedy", LOGITS)
    assert "mine of dist-mine" in no_finite_logits(selector.plan())
    own = InstalledKernel(kernel("greedy", "torch").spec, "tokenspeed-kernels")
    selector = Selector([own], PlatformInfo("cpu"))
    selector.select("greedy", LOGITS)
    message = no_finite_logits(selector.plan())
    assert "tokenspeed-kernels" not in message
