"""The kernel plan: which kernel runs each op, and why each other candidate does not."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from tokenspeed_core.api.parallel import Collective
from tokenspeed_core.errors import SelectionError
from tokenspeed_core.kernels.overrides import as_typed

FAMILIES_WITH_FLAG = ("attention", "moe", "sampling")  # --attention-backend and so on


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a candidate was not chosen, and a hint for the user ("" if there is none)."""

    what: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One candidate for one problem: whether it could run (`fits`), and the `reasons` why it does not.

    `needs_name`: it fits, but `auto` does not choose it because it is a third-party kernel without a ranking.
    `is_absent`: a flag names the backend, but it has kernels only for other ops of the family.
    """

    backend: str
    distribution: str
    fits: bool
    reasons: tuple[Reason, ...]
    needs_name: bool = False
    is_absent: bool = False


@dataclass(frozen=True, slots=True)
class PlannedOp:
    """The decision for one op and problem: the layers that share it, and all candidates in order of preference.

    `backend` and `distribution` are empty for a fused op that no kernel fits; its parts run instead.
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
    asked_by: str = "auto"  # the flag that asked for them, with "(from ...)" if it was not typed
    is_reference: bool = False  # `backend` is the op's plain PyTorch reference
    note: str = ""  # of the backend's descriptor

    def axis(self, name: str) -> Any:
        """Return an axis of the problem, None if it has no such axis."""
        return dict(self.problem).get(name)

    def alternative(self) -> str:
        """Return the flag that selects the next backend that fits, "" if no other fits.

        If nothing was chosen, the requested backends stay first, because the flag may cover other problems too.
        """
        others = [v.backend for v in self.verdicts if v.fits and v.backend != self.backend]
        if not others:
            return ""
        flag = f"--kernel-backend {self.op}" if self.asked_by == "auto" else self.asked_by
        if self.backend:
            return as_typed(flag, others[0])
        requested = [name for name in self.wanted if name != "auto"]
        return as_typed(flag, *requested, others[0], "auto")


@dataclass(frozen=True, slots=True)
class PlannedCollective:
    """A collective of a step, and the number of processes in its group.

    If it `is_draft`, the draft model runs it: once for each pass, several times in a step.
    """

    collective: Collective
    num_processes: int
    is_draft: bool = False

    @property
    def bytes_per_token(self) -> int:
        """The bytes of its result for a token."""
        return self.collective.size * (4 if self.collective.dtype == "float32" else 2)

    @property
    def sent_bytes_per_token(self) -> int:
        """The bytes that each process sends for a token, if the processes form a ring.

        Between data-parallel processes, it is one of this process's tokens, which all others get.
        """
        others = self.num_processes - 1
        if self.collective.op == "exchange_tokens":  # there and back
            return round(2 * self.bytes_per_token * others * self.collective.share)
        if self.collective.op in ("all_gather_tokens", "reduce_scatter_tokens"):
            return self.bytes_per_token * others
        num_rounds = 2 if self.collective.op == "all_reduce" else 1
        return num_rounds * self.bytes_per_token * others // self.num_processes


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """All kernel decisions of a model. The start-up table, `plugins why` and the JSON report show it.

    `collectives` are in the order of a step. `not_fused` says why the default fuses none of them with a norm.
    """

    platform: str
    ops: tuple[PlannedOp, ...]
    collectives: tuple[PlannedCollective, ...] = ()
    not_fused: str = ""

    def find(self, op: str, layer: int | None = None) -> tuple[PlannedOp, ...]:
        """Return the decisions for an op or family, of one layer if given."""
        return tuple(
            planned
            for planned in self.ops
            if op in (planned.op, planned.family) and (layer is None or layer in planned.layers)
        )

    def reference_ops(self) -> tuple[str, ...]:
        """Return the ops for which `auto` found nothing but the PyTorch reference."""
        ops = (each.op for each in self.ops if each.is_reference and each.asked_by == "auto")
        return tuple(dict.fromkeys(ops))

    def unused_third_party(self) -> tuple[str, ...]:
        """Return the flags that would select each third-party kernel that fits and that `auto` does not choose."""
        flags = []
        for planned in self.ops:
            for verdict in planned.verdicts:
                if not verdict.needs_name or verdict.backend == planned.backend:
                    continue
                if planned.family in FAMILIES_WITH_FLAG:
                    flags.append(f"--{planned.family}-backend {verdict.backend}")
                else:
                    flags.append(f"--kernel-backend {planned.op}={verdict.backend}")
        return tuple(dict.fromkeys(flags))

    def to_json(self) -> str:
        """Return the whole plan as a JSON object."""
        return json.dumps(asdict(self), ensure_ascii=False)


class NothingFitsError(SelectionError):
    """None of the requested backends fits a problem. `plan` holds that decision, with each candidate's reasons."""

    def __init__(self, message: str, plan: KernelPlan) -> None:
        super().__init__(message)
        self.plan = plan
