"""An exception that comes out of a kernel is put down to that kernel, and to nobody where it does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tokenspeed_core.api.kernels import Capability, InstalledKernel, KernelSpec, PlatformInfo
from tokenspeed_core.kernels.error_attribution import blame, no_finite_logit
from tokenspeed_core.kernels.overrides import Override
from tokenspeed_core.kernels.select import Selector

ANYWHERE = Capability(("cpu",), ("float32",))
LOGITS = {"vocab_size": 64, "dtype": "float32"}


def greedy(problem: Any) -> Callable[[], None]:
    def run() -> None:
        json.loads("no JSON")  # raises in a library, which is nobody's kernel

    return run


def sample(problem: Any) -> Callable[[], None]:
    return greedy(problem)


def kernel(op: str, backend: str, load: str) -> InstalledKernel:
    return InstalledKernel(KernelSpec(op, backend, ANYWHERE, load), f"dist-{backend}")


@pytest.fixture
def caught() -> Callable[[Callable[[], object]], Exception]:
    def catch(call: Callable[[], object]) -> Exception:
        try:
            call()
        except ValueError as error:
            return error
        raise AssertionError("it was to raise")

    return catch


def chosen(*wishes: Override) -> Selector:
    here = [kernel(op, "mine", f"{__name__}:{op}") for op in ("sample", "greedy")]
    selector = Selector(
        [*here, kernel("greedy", "other", "builtins:print")], PlatformInfo("cpu"), wishes
    )
    for op in ("sample", "greedy"):
        selector.select(op, LOGITS)
    return selector


def test_of_kernels_in_one_module_the_one_whose_function_raised_is_named(caught: Any) -> None:
    said = blame(caught(greedy(LOGITS)), chosen())
    assert said == (
        f"raised in {__name__}.greedy.<locals>.run, greedy by mine of dist-mine; "
        "`--kernel-backend greedy=other` goes on without it"
    )


def test_what_goes_on_without_it_is_said_with_the_flag_that_asked_for_it(caught: Any) -> None:
    wish = Override("greedy", ("mine",), "--kernel-backend greedy")
    assert "`--kernel-backend greedy=other`" in blame(caught(greedy(LOGITS)), chosen(wish))
    wish = Override("sampling", ("mine",), "--sampling-backend")
    assert "`--sampling-backend other`" in blame(caught(greedy(LOGITS)), chosen(wish))


def test_what_goes_on_without_it_is_no_backend_that_does_not_fit(caught: Any) -> None:
    elsewhere = KernelSpec(
        "greedy", "elsewhere", Capability(("cuda",), ("float32",)), "builtins:print"
    )
    mine = kernel("greedy", "mine", f"{__name__}:greedy")
    selector = Selector([mine, InstalledKernel(elsewhere, "dist-elsewhere")], PlatformInfo("cpu"))
    selector.select("greedy", LOGITS)
    assert blame(caught(greedy(LOGITS)), selector).endswith(
        "greedy by mine of dist-mine; no other backend fits"
    )


def test_code_that_kernels_share_is_put_down_to_the_kernel_that_called_it(caught: Any) -> None:
    package, _, _ = __name__.rpartition(".")
    assert package, "it has neighbours"
    shared: dict[str, Any] = {"__name__": f"{package}.shared"}
    exec("def call(function): return function()", shared)
    said = blame(caught(lambda: shared["call"](partial(json.loads, "no JSON"))), chosen())
    assert said.startswith(f"raised in {__name__}.")


def test_an_exception_of_no_kernel_is_put_down_to_nobody(caught: Any) -> None:
    assert blame(caught(lambda: int("x")), Selector([], PlatformInfo("cpu"))) == ""
    assert blame(ValueError("never raised"), chosen()) == ""


def test_where_no_logit_is_finite_a_stranger_may_be_to_blame_and_so_may_the_weights() -> None:
    said = no_finite_logit(chosen().plan())
    assert "weights are not finite" in said
    assert said.endswith(
        "; sample by mine of dist-mine; no other backend fits, or greedy by mine of dist-mine; "
        "`--kernel-backend greedy=other` goes on without it"
    )


def test_where_no_logit_is_finite_kernels_that_are_all_default_are_not_listed() -> None:
    own = InstalledKernel(
        KernelSpec("greedy", "torch", ANYWHERE, "builtins:print"), "tokenspeed-kernels"
    )
    selector = Selector([own], PlatformInfo("cpu"))
    selector.select("greedy", LOGITS)
    assert no_finite_logit(selector.plan()).endswith("; all kernels are TokenSpeed's own")
