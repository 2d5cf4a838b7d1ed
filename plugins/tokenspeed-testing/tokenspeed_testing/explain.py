"""A kernel plan as text for assertions."""

from __future__ import annotations

from collections.abc import Iterable

from tokenspeed_core.kernels.plan import KernelPlan, PlannedOp


def explain(plan: KernelPlan, op: str, layer: int | None = None) -> str:
    """Return every candidate for an op or family with its reasons and hints, one per line.

    Raises ValueError, which names the ops of the plan, if none of them matches.
    """
    found = plan.find(op, layer)
    if not found:
        raise ValueError(
            f"no op {op!r} at layer {layer} in the plan; it has {sorted({p.op for p in plan.ops})}"
        )
    return "\n".join(line for planned in found for line in _lines(planned))


def backends(plan: KernelPlan) -> dict[str, tuple[str, ...]]:
    """Return the backends in use by op family, in order of first use."""
    used: dict[str, tuple[str, ...]] = {}
    for planned in plan.ops:
        names = used.get(planned.family, ())
        used[planned.family] = (
            names if planned.backend in ("", *names) else (*names, planned.backend)
        )
    return used


def _lines(planned: PlannedOp) -> Iterable[str]:
    axes = ", ".join(f"{name}={value}" for name, value in planned.problem)
    yield f"{planned.op} in layers {list(planned.layers)}: {axes}"
    taken = f"{planned.backend} from {planned.distribution}: " if planned.backend else ""
    options = "".join(f", {key}={value}" for key, value in planned.options)
    yield f"  {taken}{planned.because}{options}"
    for verdict in planned.verdicts:
        for reason in verdict.reasons:
            hint = f" -> {reason.hint}" if reason.hint else ""
            yield f"  not {verdict.backend} from {verdict.distribution}: {reason.what}{hint}"
