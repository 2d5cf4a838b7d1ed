"""Kernel selection: once for each problem, when the model is built, never while steps run."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel

from tokenspeed_core.api.attention import AttentionProblem
from tokenspeed_core.api.kernels import KernelSpec, PlatformInfo, Ranking
from tokenspeed_core.api.ops import OpContract, Problem, common_ops
from tokenspeed_core.api.parallel import FUSED_OP, FUSED_PARTS, Collective
from tokenspeed_core.errors import SelectionError, describe_error
from tokenspeed_core.kernels.installed import InstalledKernel
from tokenspeed_core.kernels.options import describe_options, read_options
from tokenspeed_core.kernels.overrides import Override, as_typed, flag_for
from tokenspeed_core.kernels.plan import (
    KernelPlan,
    NothingFitsError,
    PlannedCollective,
    PlannedOp,
    Reason,
    Verdict,
)
from tokenspeed_core.kernels.refusals import hardware_refusals, problem_refusals
from tokenspeed_core.plugins.catalog import plugin_error
from tokenspeed_core.plugins.selection import DEFAULTS

Judged = list[tuple[InstalledKernel, tuple[Reason, ...]]]
"""Candidates, each with the reasons against it, none if it fits."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The kernel chosen for a problem, and its options if it declares any. It is not loaded yet."""

    spec: KernelSpec
    problem: Problem
    options: BaseModel | None


def has_module(name: str) -> bool:
    """Return whether a top-level module is installed, without importing it."""
    return importlib.util.find_spec(name) is not None


@dataclass(slots=True, eq=False)
class Selector:
    """Chooses kernels for one device and keeps every decision for the KernelPlan.

    Candidates are tried in this order: the user's list; for "auto", measured `rankings` for this compute capability,
    then kernels for fewer platforms and a narrower range of hardware, then the op's reference; ties go by distribution
    name. "auto" does not choose a kernel that `needs_ranking` and has none. `options` are the user's backend options by
    "backend.key". `needs` are features that every kernel must have ("graph_safe"). `hint` is added to errors. Layers
    from `first_draft_layer` on are those of the draft model.
    """

    kernels: Sequence[InstalledKernel]
    platform: PlatformInfo
    overrides: Sequence[Override] = ()
    _: KW_ONLY
    options: Mapping[str, Any] = field(default_factory=dict)
    rankings: Sequence[Ranking] = ()
    ops: Mapping[str, OpContract] = field(default_factory=common_ops)
    needs: frozenset[str] = frozenset()
    hint: str = ""
    first_draft_layer: int | None = None
    module_exists: Callable[[str], bool] = has_module
    _applied: set[Override] = field(default_factory=set, init=False)
    _decided: dict[Hashable, tuple[Choice | None, PlannedOp]] = field(
        default_factory=dict, init=False
    )
    _layers: dict[Hashable, set[int]] = field(default_factory=dict, init=False)
    _collectives: list[PlannedCollective] = field(default_factory=list, init=False)
    not_fused: str = field(default="", init=False)  # see KernelPlan

    def select(self, op: str, problem: Problem, *, layer: int | None = None) -> Choice:
        """Return the kernel for an op and problem; equal problems get the same Choice object.

        Raises ValueError on wrong axes, SelectionError if the op is unknown or no kernel can be used.
        """
        choice, planned = self._choose(self._contract(op), problem, layer)
        if choice is None:
            raise self._nothing_fits(planned, layer)
        return choice

    def select_all(
        self, ops: tuple[str, ...], axes: Problem, *, layer: int | None = None
    ) -> tuple[Choice, ...]:
        """Return the kernels of ops that run in sequence: one fused kernel if it fits, else one for each op.

        `axes` holds the axes of all the ops. A fused op qualifies if its contract's `parts` are exactly `ops`. An
        override that names one of the ops disables the fusion. Raises as `select` does.
        """
        parts = [self._contract(op) for op in ops]
        for contract in self.ops.values():
            if contract.parts == ops:
                fused = self.select_fused(contract.name, contract.cut(axes), layer=layer)
                if fused:
                    return (fused,)
        return tuple(self.select(part.name, part.cut(axes), layer=layer) for part in parts)

    def select_fused(self, op: str, problem: Problem, *, layer: int | None = None) -> Choice | None:
        """Return the kernel of a fused op, or None if its parts run instead (see `select_all`)."""
        contract = self._contract(op)
        parts = [self._contract(part) for part in contract.parts]
        if any(override.names_op(part) for override in self.overrides for part in parts):
            return None
        fused, planned = self._choose(contract, problem, layer)
        override = self._override(contract, problem, layer)
        if fused is not None or override is None:
            return fused
        if override.names_op(contract) and "auto" not in override.backends:
            raise self._nothing_fits(planned, layer)
        return None

    def select_collective(
        self,
        collective: Collective,
        num_processes: int,
        num_nodes: int,
        *,
        is_draft: bool = False,
    ) -> Choice:
        """Return the kernel of a collective and add it to the plan; raises as `select` does."""
        self._collectives.append(PlannedCollective(collective, num_processes, is_draft))
        problem = {
            "num_processes": num_processes,
            "num_nodes": num_nodes,
            "size": collective.size,
            "dtype": collective.dtype,
        }
        return self.select(collective.op, problem)

    def select_fused_collective(
        self,
        collective: Collective,
        num_processes: int,
        num_nodes: int,
        *,
        is_required: bool,
    ) -> Choice | None:
        """Return the kernel of the op that a collective is fused into.

        If that op quantizes and has no fitting kernel, return the kernel of FUSED_OP, which does not quantize. If none
        fits, or if an override names one of FUSED_PARTS, return None, or raise as `select` does if fusion `is_required`.
        """
        parts = [self.ops[each] for each in FUSED_PARTS if each in self.ops]
        is_named = any(override.names_op(part) for override in self.overrides for part in parts)
        if is_named and not is_required:
            self.not_fused = f"--kernel-backend names a kernel of {' or '.join(FUSED_PARTS)}"
            return None
        problem = {
            "num_processes": num_processes,
            "num_nodes": num_nodes,
            "size": collective.size,
            "max_num_tokens": collective.max_fused_tokens,
            "dtype": collective.dtype,
        }
        quantizing = (
            None
            if collective.fused_op == FUSED_OP
            else self.select_fused(collective.fused_op, problem)
        )
        if quantizing is not None or is_required:
            return quantizing or self.select(FUSED_OP, problem)
        return self.select_fused(FUSED_OP, problem)

    def select_attention(self, problem: AttentionProblem, *, layer: int | None = None) -> Choice:
        """Return the attention backend for a layer's problem; raises as `select` does."""
        return self.select("attention", asdict(problem), layer=layer)

    def plan(self) -> KernelPlan:
        """Return all decisions so far."""
        ops = (
            replace(planned, layers=tuple(sorted(self._layers.get(key, ()))))
            for key, (_, planned) in self._decided.items()
        )
        platform = self.platform.name or self.platform.kind
        return KernelPlan(platform, tuple(ops), tuple(self._collectives), self.not_fused)

    def chosen(self) -> list[tuple[Choice, PlannedOp]]:
        """Return the kernels chosen so far, each with its decision."""
        return [(choice, planned) for choice, planned in self._decided.values() if choice]

    def planned(self, choice: Choice) -> PlannedOp:
        """Return the decision that a choice belongs to."""
        return next(planned for each, planned in self.chosen() if each is choice)

    def check(self) -> None:
        """Raise SelectionError for an override or a backend option that no selection used."""
        for override in self.overrides:
            if override not in self._applied:
                raise SelectionError(self._no_effect(override))
        chosen = [choice for choice, _ in self.chosen()]
        known: dict[str, str] = {}
        for choice in chosen:
            if choice.options:
                known |= describe_options(choice.spec, type(choice.options))
        for name in sorted(self.options.keys() - known):
            used = ", ".join(sorted({choice.spec.backend for choice in chosen}))
            listed = "; ".join(": ".join(filter(None, each)) for each in known.items()) or "none"
            raise SelectionError(
                f"--backend-option {name} has no effect. Backends in use: {used}. Their options: {listed}."
            )

    def _no_effect(self, override: Override) -> str:
        found = self.plan().find(override.target)
        if not found:
            ops = ", ".join(sorted({planned.op for planned in self.plan().ops}))
            return (
                f"{override.flag} has no effect: this model does not use {override.target}. It uses {ops}. "
                "Remove the flag."
            )
        uses = {
            " ".join(filter(None, (planned.op, planned.axis("phase"), planned.axis("dtype"))))
            for planned in found
        }
        contracts = [self.ops[planned.op] for planned in found]
        if any(self._kernels_of_other_ops(override, each) for each in contracts):
            fitting = {v.backend for planned in found for v in planned.verdicts if v.fits}
            return (
                f"{override.flag} has no effect: {', '.join(override.backends)} has no kernel for the ops that this model "
                f"uses: {', '.join(sorted(uses))}. Choose another backend ({', '.join(sorted(fitting))}), or remove "
                "the flag."
            )
        return (
            f"{override.flag} has no effect: this model uses {', '.join(sorted(uses))}. Change its phase or format, or "
            "remove the flag."
        )

    def _contract(self, op: str) -> OpContract:
        if op not in self.ops:
            hint = f" {self.hint}." if self.hint else ""
            raise SelectionError(f"unknown op {op!r}. Known: {', '.join(sorted(self.ops))}.{hint}")
        return self.ops[op]

    def _choose(
        self, contract: OpContract, problem: Problem, layer: int | None
    ) -> tuple[Choice | None, PlannedOp]:
        contract.check(problem)
        override = self._override(contract, problem, layer)
        is_draft = override is not None and override.for_draft
        key = (contract.name, tuple(sorted(problem.items())), is_draft)
        if key not in self._decided:
            self._decided[key] = self._decide(contract, problem, override)
        if layer is not None:
            self._layers.setdefault(key, set()).add(layer)
        return self._decided[key]

    def _decide(
        self, contract: OpContract, problem: Problem, override: Override | None
    ) -> tuple[Choice | None, PlannedOp]:
        names = override.backends if override else ("auto",)
        source = override.flag if override else "auto"
        figures = self._figures(contract.name, problem.get("phase"))
        candidates = [kernel for kernel in self.kernels if kernel.spec.op == contract.name]
        candidates.sort(key=lambda kernel: _sort_key(kernel, tuple(figures)))
        judged = [(kernel, self._refusals(kernel.spec, problem)) for kernel in candidates]
        unranked = self._unranked(judged, figures)
        taken, because = _first(judged, names, source, figures, unranked)
        while taken is not None and (failure := self._load_failure(taken)):
            judged = [
                (kernel, failure if kernel is taken else reasons) for kernel, reasons in judged
            ]
            taken, because = _first(judged, names, source, figures, unranked)
        options = read_options(taken.spec, self.options) if taken else None
        given = (
            options.model_dump(mode="json", by_alias=True, exclude_unset=True) if options else {}
        )
        flag = flag_for(contract, problem, override)
        verdicts = (
            *_verdicts(judged, taken, names, figures, unranked, flag),
            *self._absent(contract, problem),
        )
        planned = PlannedOp(
            op=contract.name,
            family=contract.family,
            problem=tuple(sorted(problem.items())),
            layers=(),
            backend="" if taken is None else taken.spec.backend,
            distribution="" if taken is None else taken.distribution,
            because=because,
            verdicts=verdicts,
            options=tuple(given.items()),
            wanted=names,
            asked_by=source,
            is_reference=taken is not None and taken.spec.reference,
            note="" if taken is None else taken.spec.note,
        )
        if taken is None:
            return None, planned
        return Choice(taken.spec, MappingProxyType(dict(problem)), options), planned

    def _load_failure(self, kernel: InstalledKernel) -> tuple[Reason, ...]:
        """Import a chosen kernel that may fail to load, and return the reason if it does.

        Such kernels need other packages, have options, or come from a third party. Raises
        SelectionError for invalid options that the user set, and PluginError if the user named the plugin.
        """
        spec = kernel.spec
        if not (spec.requires or spec.options or kernel.distribution not in DEFAULTS):
            return ()
        try:
            spec.factory(read_options(spec, self.options))
        except SelectionError:
            raise
        except (Exception, SystemExit) as error:  # plugin code may raise anything
            if kernel.required is not None:
                raise plugin_error(
                    kernel.required, f"failed to load {spec.load}: {describe_error(error)}"
                ) from error
            return (Reason(f"it does not load: {describe_error(error)}", spec.obtain),)
        return ()

    def _figures(self, op: str, phase: str | None) -> dict[str, str]:
        """Return the measured figure of each ranked backend on this compute capability, the fastest first."""
        key = (op, phase, self.platform.compute_capability)
        found = (r for r in self.rankings if (r.op, r.phase, r.compute_capability) == key)
        return {backend: figure for ranking in found for backend, figure in ranking.figures}

    def _unranked(self, judged: Judged, figures: Mapping[str, str]) -> str:
        """Return why a backend has no measurement, "" if there is nothing to rank."""
        capability = self.platform.compute_capability
        num_fitting = sum(not reasons for _, reasons in judged)
        if capability is None or num_fitting < 2:
            return ""
        ranking = "not in the measured ranking" if figures else "no measured ranking"
        return f"{ranking} for compute capability {'.'.join(map(str, capability))}"

    def _override(
        self, contract: OpContract, problem: Problem, layer: int | None
    ) -> Override | None:
        """Return the most specific override for a problem. Raises SelectionError if two are equally specific."""
        first = self.first_draft_layer
        is_draft = first is not None and layer is not None and layer >= first
        found = [
            each
            for each in self.overrides
            if each.applies(contract, problem)
            and (is_draft or not each.for_draft)
            and not self._kernels_of_other_ops(each, contract)
        ]
        found = [each for each in found if each.for_draft] or found
        found.sort(key=lambda each: each.specificity(contract), reverse=True)
        self._applied.update(found)
        if not found:
            return None
        if len(found) > 1 and found[0].specificity(contract) == found[1].specificity(contract):
            both = " and ".join(sorted(each.flag for each in found[:2]))
            raise SelectionError(f"{both} both set the backend of {contract.name}; give only one.")
        return found[0]

    def _kernels_of_other_ops(
        self, override: Override, contract: OpContract
    ) -> list[InstalledKernel]:
        """Return the kernels of an override's backends for other ops of the family, none if one has a kernel for this op.

        A kernel of an op that this op fuses counts as one for this op. If any kernels are returned, the override does not
        apply to this op.
        """
        ops = self._with_parts(contract.name)
        found = [each for each in self.kernels if each.spec.backend in override.backends]
        if override.backends[-1] == "auto" or any(each.spec.op in ops for each in found):
            return []
        family = {each.name for each in self.ops.values() if each.family == override.target}
        return [each for each in found if each.spec.op in family]

    def _with_parts(self, op: str) -> set[str]:
        """Return the names of an op and of all ops that it fuses."""
        parts = FUSED_PARTS if op == FUSED_OP else self.ops[op].parts if op in self.ops else ()
        return {op}.union(*(self._with_parts(part) for part in parts))

    def _absent(self, contract: OpContract, problem: Problem) -> Iterator[Verdict]:
        """Yield a verdict on each backend that a flag names but that has kernels only for other ops of the family."""
        for override in self.overrides:
            if override.applies(contract, problem):
                kernels = self._kernels_of_other_ops(override, contract)
                flag = override.flag.partition(" (")[0]
                reason = Reason(f"no kernel for this op; {flag} does not apply")
                for name, distribution in dict.fromkeys(
                    (each.spec.backend, each.distribution) for each in kernels
                ):
                    yield Verdict(name, distribution, False, (reason,), is_absent=True)

    def _refusals(self, spec: KernelSpec, problem: Problem) -> tuple[Reason, ...]:
        missing = tuple(
            Reason(
                f"module {module!r} is not installed",
                spec.obtain or f"install a distribution that provides {module!r}",
            )
            for module in spec.requires
            if not self.module_exists(module)
        )
        hardware = hardware_refusals(spec.capability, self.platform)
        return (*hardware, *missing, *problem_refusals(spec.capability, problem, self.needs))

    def _nothing_fits(self, planned: PlannedOp, layer: int | None) -> NothingFitsError:
        """Return the error for a problem without a kernel, with every candidate's reasons."""
        names, verdicts = planned.wanted, planned.verdicts
        layers = () if layer is None else (layer,)
        plan = KernelPlan(
            self.platform.name or self.platform.kind, (replace(planned, layers=layers),)
        )
        if any(each.for_draft and each.flag == planned.asked_by for each in self.overrides):
            return NothingFitsError(_draft_message(planned, plan.platform), plan)
        axes = ", ".join(f"{axis}={value}" for axis, value in planned.problem)
        lines = [f"no kernel for op {planned.op!r} ({axes}) on {plan.platform}"]
        if names != ("auto",):
            lines[0] += f": {planned.asked_by} selects {', '.join(names)}"
        installed = {verdict.backend for verdict in verdicts}
        for name in names:
            if name != "auto" and name not in installed:
                lines.append(f"  {name}: no such backend is installed for this op")
        # Hints only for the requested backends, which come first.
        for verdict in sorted(verdicts, key=lambda verdict: verdict.backend not in names):
            texts = []
            for reason in verdict.reasons:
                has_hint = reason.hint and verdict.backend in names
                texts.append(f"{reason.what} -> {reason.hint}" if has_hint else reason.what)
            if not texts:
                texts = ["fits, but auto does not choose it" if verdict.needs_name else "fits"]
            lines.append(f"  {verdict.backend} ({verdict.distribution}): {'; '.join(texts)}")
        fitting = ", ".join(verdict.backend for verdict in verdicts if verdict.fits)
        if fitting:
            lines.append(f"  backends that fit: {fitting}; use {planned.alternative()}")
        else:
            lines.append("; ".join(filter(None, ("  backends that fit: none", self.hint))))
        return NothingFitsError("\n".join(lines), plan)


def _draft_message(planned: PlannedOp, device: str) -> str:
    """Return why none of the backends that the user named fits a layer of the draft model, in one line."""
    reasons = []
    for name in planned.wanted:
        found = [each.reasons for each in planned.verdicts if each.backend == name]
        texts = [reason.what for reason in min(found, key=len)] if found else ["no such kernel"]
        reasons.append(f"{name}: {', '.join(texts)}")
    fitting = dict.fromkeys(each.backend for each in planned.verdicts if each.fits)
    return (
        f"{planned.asked_by}: no {planned.op} kernel for the draft model on {device} ({'; '.join(reasons)}). "
        f"Backends that fit: {', '.join(fitting) or 'none'}."
    )


def _first(
    judged: Judged,
    names: tuple[str, ...],
    source: str,
    figures: Mapping[str, str],
    unranked: str,
) -> tuple[InstalledKernel | None, str]:
    for name in names:
        for kernel, reasons in judged:
            if reasons or (name == "auto" and not _is_auto(kernel, figures)):
                continue
            if name == "auto":
                place = "the reference" if kernel.spec.reference else "the most specific that fits"
                return kernel, figures.get(kernel.spec.backend, _joined(", ", place, unranked))
            if name == kernel.spec.backend:
                return kernel, f"selected by {source}"
    return None, "no kernel fits; the ops that it fuses run separately"


def _is_auto(kernel: InstalledKernel, figures: Mapping[str, str]) -> bool:
    """Return whether `auto` may choose a kernel that fits."""
    is_measured = kernel.spec.backend in figures
    if kernel.spec.needs_compile or kernel.spec.needs_name:
        return False
    return is_measured or not kernel.needs_ranking


def _verdicts(
    judged: Judged,
    taken: InstalledKernel | None,
    names: tuple[str, ...],
    figures: Mapping[str, str],
    unranked: str,
    flag: str,
) -> Iterator[Verdict]:
    """Yield a verdict on each candidate. If it fits but was not chosen, its hint is the `flag` that selects it."""
    for kernel, reasons in judged:
        spec, fits = kernel.spec, not reasons
        needs_name = fits and kernel.needs_ranking and spec.backend not in figures
        if fits and kernel is not taken and taken is not None:
            figure = figures.get(spec.backend, unranked)
            first = next(
                other for other, no in judged if not no and other.spec.backend == spec.backend
            )
            if first is not kernel:
                why = f"another kernel of this name, from {first.distribution}, comes first"
            elif spec.needs_compile and spec.backend not in names:
                why = "auto does not choose kernels that must be compiled before the first call"
                why = _joined("; ", why, figure)
            elif spec.needs_name and spec.backend not in names:
                why = "auto does not choose it: no measured ranking for this device covers this kernel"
            elif needs_name and spec.backend not in names:
                why = "auto does not choose third-party kernels that have no measured ranking"
            else:
                why = _joined(", ", figure, f"{taken.spec.backend} comes first")
            # "auto" covers problems of the same op that this backend does not fit.
            hint = as_typed(flag, spec.backend, "auto") if first is kernel else ""
            reasons = (Reason(why, hint),)
        yield Verdict(spec.backend, kernel.distribution, fits, reasons, needs_name)


def _joined(separator: str, *parts: str) -> str:
    return separator.join(filter(None, parts))


def _sort_key(kernel: InstalledKernel, fastest: tuple[str, ...]) -> tuple[Any, ...]:
    spec = kernel.spec
    is_ranked = spec.backend in fastest
    place = fastest.index(spec.backend) if is_ranked else len(fastest)
    needs_name = kernel.needs_ranking and not is_ranked
    breadth = spec.capability.breadth()
    return place, needs_name, spec.reference, breadth, kernel.distribution, spec.backend
