"""The frozen record of which kernel runs which op, who was rejected, why, and what would change it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import groupby
from textwrap import wrap
from typing import Any

from tokenspeed_core.errors import SelectionError

_WIDTH, _HEIGHT, _MOST = (
    80,
    24,
    8,
)  # columns and lines of the start-up summary, and most of its reasons


FAMILIES_WITH_FLAG = ("attention", "moe", "sampling")  # --attention-backend and so on


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a candidate was not taken, and what would change that (empty: nothing that a user can do)."""

    what: str
    mend: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One candidate for one problem: whether it could run (`fits`), and the `reasons` why it does not.

    `needs_name`: it fits, but `auto` does not choose it because it is a third-party kernel without a ranking.
    """

    backend: str
    distribution: str
    fits: bool
    reasons: tuple[Reason, ...]
    needs_name: bool = False


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
    options: tuple[tuple[str, Any], ...] = ()  # of the backend, as the user set them
    wanted: tuple[str, ...] = ("auto",)  # backends in order of preference
    asked_by: str = "auto"  # the flag that wanted them, and "(from ...)" where it was not typed
    is_reference: bool = False  # `backend` is the op's plain PyTorch reference

    def axis(self, name: str) -> Any:
        """Return an axis of the problem, None where it has none of that name."""
        return dict(self.problem).get(name)

    def without(self) -> str:
        """Return the flag that takes the next backend that fits, "" where there is none.

        Where nothing was taken what was asked for stays first, and auto last: the flag may speak of other problems.
        """
        others = [
            verdict.backend
            for verdict in self.verdicts
            if verdict.fits and verdict.backend != self.backend
        ]
        flag = f"--kernel-backend {self.op}" if self.asked_by == "auto" else self.asked_by
        names = (
            others[:1]
            if self.backend
            else [*(n for n in self.wanted if n != "auto"), *others[:1], "auto"]
        )
        return typed(flag, *names) if others else ""


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """Every kernel decision of a built model; start-up summary, `plugins why` and JSON are views of it."""

    platform: str
    ops: tuple[PlannedOp, ...]

    def find(self, op: str, layer: int | None = None) -> tuple[PlannedOp, ...]:
        """Return the decisions for an op or family, of one layer if given."""
        found = (planned for planned in self.ops if op in (planned.op, planned.family))
        return tuple(planned for planned in found if layer is None or layer in planned.layers)

    def reference_ops(self) -> tuple[str, ...]:
        """Return the ops for which `auto` found nothing but the PyTorch reference."""
        ops = (each.op for each in self.ops if each.is_reference and each.asked_by == "auto")
        return tuple(dict.fromkeys(ops))

    def unused_third_party(self) -> tuple[str, ...]:
        """Return the flags that would select each third-party kernel that fits and that `auto` does not choose."""
        flags = (
            (
                f"--{planned.family}-backend {verdict.backend}"
                if planned.family in FAMILIES_WITH_FLAG
                else f"--kernel-backend {planned.op}={verdict.backend}"
            )
            for planned in self.ops
            for verdict in planned.verdicts
            if verdict.needs_name and verdict.backend != planned.backend
        )
        return tuple(dict.fromkeys(flags))

    def table(self) -> str:
        """Return the start-up summary: a line per op and backend, then the first reasons against the others.

        It fits a screen, for which reasons make room; `plugins why` tells the rest.
        """
        rows = [("op", "backend", "from", "for")]
        against: dict[tuple[str, str], dict[str, None]] = {}
        grouped: dict[tuple[str, str, str], list[PlannedOp]] = {}
        for each in self.ops:
            grouped.setdefault((each.op, each.backend, each.distribution), []).append(each)
        for (op, backend, distribution), planned in grouped.items():
            is_part = sum(other == op for other, *_ in grouped) > 1
            rows.append(
                (op, backend or "its parts", distribution or "-", _extent(planned, is_part))
            )
            for loser in (
                v for p in planned for v in p.verdicts if v.reasons and v.backend != p.backend
            ):
                against.setdefault((loser.backend, loser.reasons[0].what), {})[op] = None
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines, indent = [f"kernels on {self.platform}"], " " * min(sum(widths) + 6, _WIDTH // 2)
        for row in rows:
            line = "  ".join([*map(str.ljust, row, widths), row[3]]).rstrip()
            lines += wrap(
                line,
                _WIDTH,
                subsequent_indent=indent,
                break_long_words=False,
                break_on_hyphens=False,
            )
        reasons = [
            f"not {backend}: {why} ({', '.join(ops)})" for (backend, why), ops in against.items()
        ]
        room = max(1, min(_MOST, _HEIGHT - 1 - len(lines)))
        lines += (
            line if len(line) <= _WIDTH else f"{line[: _WIDTH - 1]}…" for line in reasons[:room]
        )
        rest = f"and {len(reasons) - room} reasons more: `tokenspeed plugins why OP` tells all"
        return "\n".join([*lines, *[rest] * (len(reasons) > room)])

    def occurrences(self, target: str) -> str:
        """Say for which phases, dtypes and layers an op or family was asked for, or what was, for people."""
        found = self.find(target)
        if not found:
            return f"the model asks for no {target}, but for {', '.join(sorted({p.op for p in self.ops}))}"
        axes = (
            sorted({str(planned.axis(axis) or "none") for planned in found})
            for axis in ("phase", "dtype")
        )
        phases, dtypes = map(", ".join, axes)
        ops = ", ".join(sorted({planned.op for planned in found} - {target}))
        where = f"phase {phases}; dtype {dtypes}; layers {_layers(found) or 'none'}"
        return f"{target} is asked for {f'as {ops}, ' if ops else ''}with {where}"

    def to_json(self) -> str:
        """Return the whole plan as a JSON object."""
        return json.dumps(asdict(self), ensure_ascii=False)


class NothingFitsError(SelectionError):
    """No backend that was asked for fits a problem; `plan` has that decision, with every candidate's reasons."""

    def __init__(self, message: str, plan: KernelPlan) -> None:
        """Keep the plan beside the message."""
        super().__init__(message)
        self.plan = plan


def typed(flag: str, *backends: str) -> str:
    """Return a flag that wants backends as it is typed with their names, wherever what it overrides came from."""
    flag = flag.partition(" (")[0]
    return f"{flag}{'=' if flag.startswith('--kernel-backend') else ' '}{','.join(backends)}"


def _extent(group: list[PlannedOp], is_part: bool) -> str:
    """Return what a line of the table serves: phases, layers where others have the rest, and the user's options."""
    words = [p.axis("phase") for p in group if p.axis("phase")]
    if is_part and any(p.layers for p in group):
        words.append(f"layers {_layers(group)}")
    return ", ".join(
        dict.fromkeys([*words, *(f"{key}={value}" for p in group for key, value in p.options)])
    )


def _layers(group: Iterable[PlannedOp]) -> str:
    """Write the layers of decisions with runs shortened: 0, 1, 2 and 5 are "0-2, 5"."""
    numbers = sorted({layer for planned in group for layer in planned.layers})
    runs = [list(run) for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ", ".join(
        str(run[0][1]) if len(run) == 1 else f"{run[0][1]}-{run[-1][1]}" for run in runs
    )
