"""Finds the kernel that raised an exception, and the flag that selects another one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from traceback import walk_tb
from types import CodeType
from typing import Any

from tokenspeed_core.kernels.plan import KernelPlan, PlannedOp
from tokenspeed_core.plugins.selection import DEFAULTS

Bound = Iterable[tuple[Any, PlannedOp]]
"""The kernels in use, each with its decision."""


def describe_kernel(planned: PlannedOp) -> str:
    """Return a kernel's op, phase, backend and distribution, and the flag that selects another one."""
    phase, flag = planned.axis("phase"), planned.alternative()
    op = f"{planned.op} ({phase})" if phase else planned.op
    hint = f"To use another backend: {flag}" if flag else "No other backend fits"
    return f"{op} kernel {planned.backend} of {planned.distribution}. {hint}"


def attribute_error(error: BaseException, bound: Bound) -> str:
    """Return a description of the kernel that raised an exception, "" if no kernel did.

    It is the kernel of the innermost frame in the traceback that runs a kernel's function or a method of its object.
    Nothing is recorded while steps run.
    """
    kernels = list(bound)
    by_object = {id(kernel): planned for kernel, planned in kernels}
    by_code: dict[CodeType, PlannedOp] = {}
    for kernel, planned in kernels:
        code = _code(kernel)
        if code is not None:
            by_code.setdefault(code, planned)
    found: PlannedOp | None = None
    for frame, _ in walk_tb(error.__traceback__):
        owner = id(frame.f_locals.get("self"))
        found = by_object.get(owner) or by_code.get(frame.f_code) or found
    return f"Raised in {describe_kernel(found)}" if found else ""


def _code(kernel: Any) -> CodeType | None:
    """Return the code of a kernel that is a function, without partial arguments."""
    while isinstance(kernel, partial):
        kernel = kernel.func
    code = getattr(kernel, "__code__", None)
    return code if isinstance(code, CodeType) else None


def no_finite_logits(plan: KernelPlan) -> str:
    """Return the error for a warm-up in which no request got finite logits."""
    third_party = [
        describe_kernel(replace(planned, problem=()))
        for planned in plan.ops
        if planned.backend and planned.distribution not in DEFAULTS
    ]
    hint = "; ".join(dict.fromkeys(third_party)) or "none"
    return (
        "Warm-up failed: the model produced NaN or Inf logits. Check the checkpoint's weights and --dtype. "
        f"Kernels of other distributions in use: {hint}."
    )
