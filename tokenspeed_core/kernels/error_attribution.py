"""Whose kernel raised, and what to type to go on without it."""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile
from traceback import walk_tb

from tokenspeed_core.kernels.plan import KernelPlan, PlannedOp
from tokenspeed_core.kernels.select import Selector
from tokenspeed_core.plugins.selection import DEFAULTS

_CALLER = "tokenspeed_core.worker.attention"  # where a local `phase` says which of a layer's kernels is called


def name_kernel(planned: PlannedOp) -> str:
    """Return the op, phase, backend and distribution of a kernel, and the flag that takes another."""
    phase, flag = planned.axis("phase"), planned.without()
    mend = f"`{flag}` goes on without it" if flag else "no other backend fits"
    return f"{planned.op}{(phase and f' ({phase})') or ''} by {planned.backend} of {planned.distribution}; {mend}"


def blame(error: BaseException, selector: Selector) -> str:
    """Name the kernel whose code an exception came out of, "" where it was none's.

    It is found in the traceback, so that a call that succeeds pays nothing. The frame whose module is nearest to a
    kernel's counts, the innermost of equals. Of kernels in one module, the one whose `load` the frame's function begins
    with is taken, else the first.
    """
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    places = [
        (frame.f_globals.get("__name__", ""), frame.f_code.co_qualname, frame.f_locals)
        for frame in frames
    ]
    phase = next(
        (names["phase"] for module, _, names in places if module == _CALLER and "phase" in names),
        None,
    )
    best, whose = (0, False), ""
    for module, function, _ in reversed(places):
        for choice, planned in selector.chosen():
            home, _, factory = choice.spec.load.partition(":")
            parts = zip(module.split("."), home.split("."), strict=False)
            near = (
                sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], parts)),
                function.startswith(factory),
            )
            if near[0] and near > best and phase in (None, planned.axis("phase")):
                best, whose = near, f"raised in {module}.{function}, {name_kernel(planned)}"
    return whose


def no_finite_logit(plan: KernelPlan) -> str:
    """Say what may be to blame where no request gets finite logits: nothing raised that would single a kernel out."""
    foreign = [
        replace(each, problem=())
        for each in plan.ops
        if each.backend and each.distribution not in DEFAULTS
    ]
    whose = (
        ", or ".join(dict.fromkeys(map(name_kernel, foreign))) or "all kernels are TokenSpeed's own"
    )
    return (
        "none of the start's own requests got finite logits: either weights are not finite, in the checkpoint or "
        f"in this --dtype, or what a kernel computes is not; {whose}"
    )
