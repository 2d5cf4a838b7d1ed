"""The frozen record of which kernel runs which op, who was rejected, why, and what would change it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a candidate was not taken, and what would change that (empty: nothing that a user can do)."""

    what: str
    mend: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One candidate for one problem. `fits` is whether it could run; `reasons` why it does not."""

    backend: str
    distribution: str
    fits: bool
    reasons: tuple[Reason, ...]


@dataclass(frozen=True, slots=True)
class PlannedOp:
    """One op and problem, the layers that share it, and all candidates in the order of preference.

    `backend` and `distribution` are empty for a fused op that nothing fits: then its parts run.
    """

    op: str
    family: str
    problem: tuple[tuple[str, Any], ...]
    layers: tuple[int, ...]
    backend: str
    distribution: str
    because: str
    verdicts: tuple[Verdict, ...]


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """Every kernel decision of a built model; start-up summary, `plugins why` and JSON are views of it."""

    platform: str
    ops: tuple[PlannedOp, ...]

    def backends(self) -> Mapping[str, tuple[str, ...]]:
        """Return the backends in use by op family, in order of first use."""
        used: dict[str, tuple[str, ...]] = {}
        for planned in self.ops:
            names = used.get(planned.family, ())
            used[planned.family] = names if planned.backend in ("", *names) else (*names, planned.backend)
        return used

    def find(self, op: str, layer: int | None = None) -> tuple[PlannedOp, ...]:
        """Return the decisions for an op or family, of one layer if given."""
        return tuple(
            planned
            for planned in self.ops
            if op in (planned.op, planned.family) and (layer is None or layer in planned.layers)
        )

    def table(self) -> str:
        """Return the start-up summary: a line per op and backend, the others with their first reason."""
        rows = [("op", "backend", "from", "problems", "not taken")]
        for (op, backend, distribution), planned in _grouped(self.ops).items():
            others = {v.backend: v.reasons[0].what for p in planned for v in p.verdicts if v.reasons}
            losers = "; ".join(f"{name}: {why}" for name, why in others.items() if name != backend)
            rows.append((op, backend or "its parts", distribution or "-", str(len(planned)), losers or "-"))
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        padded = ([*map(str.ljust, row, widths), row[4]] for row in rows)
        lines = ["  ".join(cells) for cells in padded]
        return "\n".join([f"kernels on {self.platform}", *lines])

    def explain(self, op: str, layer: int | None = None) -> str:
        """Return every candidate of an op with all reasons and their mends, for people.

        Raises ValueError, naming the ops there are, if the plan has none of that name.
        """
        found = self.find(op, layer)
        if not found:
            where = "" if layer is None else f" at layer {layer}"
            raise ValueError(f"no op {op!r}{where} in the plan; it has {sorted({p.op for p in self.ops})}")
        return "\n".join(line for planned in found for line in _explained(planned))

    def to_json(self) -> str:
        """Return the whole plan as a JSON object."""
        return json.dumps(asdict(self), ensure_ascii=False)


def _grouped(ops: Iterable[PlannedOp]) -> dict[tuple[str, str, str], list[PlannedOp]]:
    groups: dict[tuple[str, str, str], list[PlannedOp]] = {}
    for planned in ops:
        groups.setdefault((planned.op, planned.backend, planned.distribution), []).append(planned)
    return groups


def _explained(planned: PlannedOp) -> Iterable[str]:
    axes = ", ".join(f"{name}={value}" for name, value in planned.problem)
    layers = f" (layers {_ranges(planned.layers)})" if planned.layers else ""
    yield f"{planned.op}{layers}: {axes}"
    taken = f"{planned.backend} from {planned.distribution}: " if planned.backend else ""
    yield f"  {taken}{planned.because}"
    for verdict in planned.verdicts:
        for reason in verdict.reasons:
            mend = f" -> {reason.mend}" if reason.mend else ""
            yield f"  not {verdict.backend} from {verdict.distribution}: {reason.what}{mend}"


def _ranges(numbers: tuple[int, ...]) -> str:
    """Write sorted numbers with runs shortened: (0, 1, 2, 5) is "0-2, 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
