"""Choosing a kernel for each problem, once, when the model is built; the step path never comes here."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel

from tokenspeed_core.api.attention import AttentionProblem
from tokenspeed_core.api.kernels import (
    Capability,
    InstalledKernel,
    KernelSpec,
    PlatformInfo,
    Ranking,
)
from tokenspeed_core.api.ops import OpContract, Problem, common_ops
from tokenspeed_core.errors import SelectionError, describe_error
from tokenspeed_core.kernels.options import described, settle
from tokenspeed_core.kernels.overrides import Override, flag_for
from tokenspeed_core.kernels.plan import (
    KernelPlan,
    NothingFitsError,
    PlannedOp,
    Reason,
    Verdict,
    typed,
)
from tokenspeed_core.plugins.catalog import blaming
from tokenspeed_core.plugins.metadata import check_build
from tokenspeed_core.plugins.selection import DEFAULTS

_FLAGS = {"dtype": "--dtype", "block_size": "--block-size"}


@dataclass(frozen=True, slots=True)
class Choice:
    """The kernel taken for a problem, and its options if it declares any; not yet loaded."""

    spec: KernelSpec
    problem: Problem
    options: BaseModel | None


def has_module(name: str) -> bool:
    """Say whether a top-level module is installed, without importing it."""
    return importlib.util.find_spec(name) is not None


@dataclass(slots=True, eq=False)
class Selector:
    """Chooses kernels for one device and remembers every decision for the KernelPlan.

    Order: the user's list; then, for "auto", what `rankings` measured on such a device; then the kernels for
    fewer platforms and a narrower range of hardware before general ones, the op's reference last, ties by
    distribution name. "auto" does not choose a kernel that `needs_ranking` and has none. `options` are what the user set, by "backend.key". `needs` are features that every problem
    must be served with ("graph_safe", "batch_invariant"). Reading the plan changes nothing. `hint` says what to do
    where no backend fits.
    """

    kernels: Sequence[InstalledKernel]
    platform: PlatformInfo
    preferences: Sequence[Override] = ()
    _: KW_ONLY
    options: Mapping[str, Any] = field(default_factory=dict)
    rankings: Sequence[Ranking] = ()
    ops: Mapping[str, OpContract] = field(default_factory=common_ops)
    needs: frozenset[str] = frozenset()
    hint: str = ""
    module_exists: Callable[[str], bool] = has_module
    _heeded: set[Override] = field(default_factory=set, init=False)
    _decided: dict[Hashable, tuple[Choice | None, PlannedOp]] = field(
        default_factory=dict, init=False
    )
    _layers: dict[Hashable, set[int]] = field(default_factory=dict, init=False)

    def select(self, op: str, problem: Problem, *, layer: int | None = None) -> Choice:
        """Return the kernel for an op and problem, the same one whenever problem and wishes are the same.

        Raises ValueError on wrong axes, SelectionError if no plugin brings the op or no kernel can be taken.
        """
        choice, planned = self._choose(self._contract(op), problem, layer)
        if choice is None:
            raise self._refused(planned, layer)
        return choice

    def select_all(
        self, ops: tuple[str, ...], axes: Problem, *, layer: int | None = None
    ) -> tuple[Choice, ...]:
        """Return the kernels of ops that run one after another: a fused one where it fits, else one for each.

        `axes` holds those of all the ops. An op is fused from these if its contract's `parts` are just these; the
        plan has it also where nothing fits, with the reasons. A wish for one of the ops by its name parts them.
        Raises as `select` does, also for a fused op that was named.
        """
        parts = [self._contract(op) for op in ops]
        for contract in self.ops.values():
            if contract.parts == ops and (
                fused := self.select_fused(contract.name, contract.cut(axes), layer=layer)
            ):
                return (fused,)
        return tuple(self.select(part.name, part.cut(axes), layer=layer) for part in parts)

    def select_fused(self, op: str, problem: Problem, *, layer: int | None = None) -> Choice | None:
        """Return the kernel of a fused op, or None where its parts are to run: see `select_all`."""
        contract = self._contract(op)
        if any(
            wish.names_op(self._contract(part))
            for wish in self.preferences
            for part in contract.parts
        ):
            return None
        fused, planned = self._choose(contract, problem, layer)
        wish = self._wish(contract, problem, layer)
        if fused is None and wish and wish.names_op(contract) and "auto" not in wish.backends:
            raise self._refused(planned, layer)
        return fused

    def select_attention(self, problem: AttentionProblem, *, layer: int | None = None) -> Choice:
        """Return the attention backend for a layer's problem; raises as `select` does."""
        return self.select("attention", asdict(problem), layer=layer)

    def plan(self) -> KernelPlan:
        """Return all decisions so far as a frozen plan."""
        found = self._decided.items()
        ops = (
            replace(planned, layers=tuple(sorted(self._layers.get(key, ()))))
            for key, (_, planned) in found
        )
        return KernelPlan(self.platform.name or self.platform.kind, tuple(ops))

    def chosen(self) -> list[tuple[Choice, PlannedOp]]:
        """Return what was taken so far, each with its decision."""
        return [
            (choice, planned) for choice, planned in self._decided.values() if choice is not None
        ]

    def check(self) -> None:
        """Raise SelectionError for a wish or an option that had no effect on what was selected so far."""
        for wish in self.preferences:
            last = max(
                (layer for planned in self.plan().find(wish.target) for layer in planned.layers),
                default=-1,
            )
            if wish not in self._heeded or (wish.layers and wish.layers[-1] > last):
                what = (
                    f"goes beyond the last layer, {last}"
                    if wish in self._heeded
                    else "has no effect"
                )
                raise SelectionError(f"{wish.flag} {what}: {self.plan().occurrences(wish.target)}")
        chosen = [choice for choice, _ in self.chosen()]
        there = [
            described(choice.spec, type(choice.options)) for choice in chosen if choice.options
        ]
        known = {name: text for each in there for name, text in each.items()}
        for name in sorted(self.options.keys() - known):
            used = ", ".join(sorted({choice.spec.backend for choice in chosen}))
            listed = "; ".join(": ".join(filter(None, each)) for each in known.items()) or "none"
            raise SelectionError(
                f"--backend-option {name} has no effect: used are {used}; their options: {listed}"
            )

    def _contract(self, op: str) -> OpContract:
        if op not in self.ops:
            hint = f"; {self.hint}" if self.hint else ""
            raise SelectionError(f"unknown op {op!r}; known: {', '.join(sorted(self.ops))}{hint}")
        return self.ops[op]

    def _choose(
        self, contract: OpContract, problem: Problem, layer: int | None
    ) -> tuple[Choice | None, PlannedOp]:
        contract.check(problem)
        wish = self._wish(contract, problem, layer)
        key = (contract.name, tuple(sorted(problem.items())), wish)
        if key not in self._decided:
            self._decided[key] = self._decide(contract, problem, wish)
        if layer is not None:
            self._layers.setdefault(key, set()).add(layer)
        return self._decided[key]

    def _decide(
        self, contract: OpContract, problem: Problem, wish: Override | None
    ) -> tuple[Choice | None, PlannedOp]:
        names, source = (wish.backends, wish.flag) if wish else (("auto",), "auto")
        figures = self._figures(contract.name, problem.get("phase"))
        candidates = [kernel for kernel in self.kernels if kernel.spec.op == contract.name]
        candidates.sort(key=lambda kernel: _host_order(kernel, tuple(figures)))
        judged = [(kernel, self._refusals(kernel.spec, problem)) for kernel in candidates]
        taken, because = _first(judged, names, source, figures)
        while taken is not None and (failure := self._load_failure(taken)):
            judged = [
                (kernel, failure if kernel is taken else reasons) for kernel, reasons in judged
            ]
            taken, because = _first(judged, names, source, figures)
        options = settle(taken.spec, self.options) if taken else None
        given = (
            options.model_dump(mode="json", by_alias=True, exclude_unset=True) if options else {}
        )
        planned = PlannedOp(
            op=contract.name,
            family=contract.family,
            problem=tuple(sorted(problem.items())),
            layers=(),
            backend="" if taken is None else taken.spec.backend,
            distribution="" if taken is None else taken.distribution,
            because=because,
            verdicts=tuple(
                _verdicts(judged, taken, names, figures, flag_for(contract, problem, wish))
            ),
            options=tuple(given.items()),
            wanted=names,
            asked_by=source,
            is_reference=taken is not None and taken.spec.reference,
        )
        if taken is None:
            return None, planned
        return Choice(taken.spec, MappingProxyType(dict(problem)), options), planned

    def _load_failure(self, kernel: InstalledKernel) -> tuple[Reason, ...]:
        """Import a kernel that stands on other packages, which may be there and broken, or made for another machine.

        So may be what is of no default distribution. Compiled code whose metadata names another build is not loaded.
        Options that its schema refuses are such a failure too; those that the user set raise SelectionError. One of a
        plugin that must not fail raises PluginError.
        """
        spec = kernel.spec
        try:
            if spec.requires or spec.options or kernel.distribution not in DEFAULTS:
                check_build(kernel.distribution)
                spec.factory(settle(spec, self.options))
        except SelectionError:
            raise
        except (
            Exception,
            SystemExit,
        ) as error:  # whatever a package raises, another kernel may serve
            if kernel.required is not None:
                raise blaming(
                    kernel.required, f": {spec.load} does not load: {describe_error(error)}"
                ) from error
            return (Reason(f"it does not load: {describe_error(error)}", spec.obtain),)
        return ()

    def _figures(self, op: str, phase: str | None) -> dict[str, str]:
        """Return what was measured of the op's backends on such a device, the fastest first."""
        key = (op, phase, self.platform.compute_capability)
        found = (r for r in self.rankings if (r.op, r.phase, r.compute_capability) == key)
        return {backend: figure for ranking in found for backend, figure in ranking.figures}

    def _wish(self, contract: OpContract, problem: Problem, layer: int | None) -> Override | None:
        """Return the narrowest of the user's wishes for a problem. Raises SelectionError where two are as narrow."""
        wishes = [wish for wish in self.preferences if wish.applies(contract, problem, layer)]
        wishes.sort(key=lambda wish: wish.narrowness(contract), reverse=True)
        self._heeded.update(wishes)
        if len(wishes) > 1 and wishes[0].narrowness(contract) == wishes[1].narrowness(contract):
            both = " and ".join(sorted(wish.flag for wish in wishes[:2]))
            raise SelectionError(f"{both} both speak of {contract.name}: give one, or narrow it")
        return wishes[0] if wishes else None

    def _refusals(self, spec: KernelSpec, problem: Problem) -> tuple[Reason, ...]:
        missing = tuple(
            Reason(
                f"module {module!r} is not installed",
                spec.obtain or f"install what provides {module!r}",
            )
            for module in spec.requires
            if not self.module_exists(module)
        )
        hardware = hardware_refusals(spec.capability, self.platform)
        return (*hardware, *missing, *problem_refusals(spec.capability, problem, self.needs))

    def _refused(self, planned: PlannedOp, layer: int | None) -> SelectionError:
        names, verdicts = planned.wanted, planned.verdicts
        axes = ", ".join(f"{axis}={value}" for axis, value in planned.problem)
        device = self.platform.name or self.platform.kind
        lines = [f"no kernel for op {planned.op!r} ({axes}) on {device}"]
        if names != ("auto",):
            lines[0] += f": {planned.asked_by} asks for {', '.join(names)}"
        unknown = [n for n in names if n != "auto" and n not in {v.backend for v in verdicts}]
        lines += [f"  {name}: no such backend is installed for this op" for name in unknown]
        for v in sorted(
            verdicts, key=lambda v: v.backend not in names
        ):  # of what was asked for, also what mends it
            told = (
                f"{r.what} -> {r.mend}" if r.mend and v.backend in names else r.what
                for r in v.reasons
            )
            fits = "fits, but only when named" if v.needs_name else "fits"
            lines.append(f"  {v.backend} ({v.distribution}): {'; '.join(told) or fits}")
        fitting = ", ".join(v.backend for v in verdicts if v.fits)
        taken = f"{fitting}; `{planned.without()}` takes one where what was asked for cannot"
        lines.append(
            f"  backends that fit: {taken if fitting else '; '.join(filter(None, ['none', self.hint]))}"
        )
        layers = () if layer is None else (layer,)
        return NothingFitsError(
            "\n".join(lines), KernelPlan(device, (replace(planned, layers=layers),))
        )


def _first(
    judged: list[tuple[InstalledKernel, tuple[Reason, ...]]],
    names: tuple[str, ...],
    source: str,
    figures: Mapping[str, str],
) -> tuple[InstalledKernel | None, str]:
    for name in names:
        for kernel, reasons in judged:
            if reasons or (name == "auto" and not _is_auto(kernel, figures)):
                continue
            if name == "auto":
                unmeasured = (
                    "the reference" if kernel.spec.reference else "the most specific that fits"
                )
                return kernel, figures.get(kernel.spec.backend, unmeasured)
            if name == kernel.spec.backend:
                return kernel, f"asked for by {source}"
    return None, "nothing fits, so its parts run one by one"


def _is_auto(kernel: InstalledKernel, figures: Mapping[str, str]) -> bool:
    """Return whether `auto` may choose a kernel that fits."""
    is_measured = kernel.spec.backend in figures
    return not kernel.spec.needs_compile and (is_measured or not kernel.needs_ranking)


def _verdicts(
    judged: list[tuple[InstalledKernel, tuple[Reason, ...]]],
    taken: InstalledKernel | None,
    names: tuple[str, ...],
    figures: Mapping[str, str],
    flag: str,
) -> Iterator[Verdict]:
    """Yield what is said of each candidate; of one that fits and was not taken, what to type for it with `flag`."""
    for kernel, reasons in judged:
        spec, fits = kernel.spec, not reasons
        needs_name = fits and kernel.needs_ranking and spec.backend not in figures
        if fits and kernel is not taken and taken is not None:
            first = next(
                other for other, no in judged if not no and other.spec.backend == spec.backend
            )
            if first is not kernel:
                why = f"{first.distribution} serves this name first"
            elif spec.needs_compile and spec.backend not in names:
                why = "it must be compiled before the first call, so auto passes it over"
            elif needs_name and spec.backend not in names:
                why = "auto does not choose third-party kernels that have no measured ranking"
            else:
                why = ", ".join(
                    filter(None, (figures.get(spec.backend), f"{taken.spec.backend} comes first"))
                )
            # "auto" serves the problems of the same op that this backend does not fit
            reasons = (Reason(why, typed(flag, spec.backend, "auto") if first is kernel else ""),)
        yield Verdict(spec.backend, kernel.distribution, fits, reasons, needs_name)


def _host_order(kernel: InstalledKernel, fastest: tuple[str, ...]) -> tuple[Any, ...]:
    spec = kernel.spec
    is_ranked = spec.backend in fastest
    place = fastest.index(spec.backend) if is_ranked else len(fastest)
    needs_name = kernel.needs_ranking and not is_ranked
    breadth = spec.capability.breadth()
    return place, needs_name, spec.reference, breadth, kernel.distribution, spec.backend


def hardware_refusals(capability: Capability, platform: PlatformInfo) -> Iterable[Reason]:
    if platform.kind not in capability.platforms:
        wanted = " or ".join(capability.platforms)
        yield Reason(
            f"it runs on {wanted}, and the device is {platform.kind}", f"a {wanted} device"
        )
        return
    low, high = capability.min_compute_capability, capability.max_compute_capability
    found = platform.compute_capability
    if (low or high) and not (found and (low or found) <= found <= (high or found)):
        wanted = " to ".join(dict.fromkeys((_version(low, "any"), _version(high, "any"))))
        what = f"compute capability {_version(found, 'unknown')} is {'not' if low == high else 'outside'} {wanted}"
        yield Reason(what, f"a device of compute capability {wanted}")


def problem_refusals(
    capability: Capability, problem: Problem, needs: frozenset[str] = frozenset()
) -> Iterable[Reason]:
    """Yield every reason why a capability does not cover a problem served with the features `needs`."""
    for axis, allowed in (
        ("dtype", capability.dtypes),
        ("kv_dtype", capability.kv_dtypes),
        ("head_size", capability.head_sizes),
        ("block_size", capability.block_sizes),
        ("phase", capability.phases),
    ):
        if axis in problem and allowed and problem[axis] not in allowed:
            what = f"{axis} {problem[axis]} is not among {', '.join(map(str, allowed))}"
            yield Reason(what, _mend(axis, problem["dtype"], allowed))
    for limit in capability.limits:
        if limit.axis in problem and (refusal := limit.refusal(problem[limit.axis])):
            yield Reason(refusal)
    windowed = {"window"} if problem.get("window") is not None else set()
    for feature in sorted((needs | windowed) - capability.features):
        yield Reason(
            f"it is not declared {feature}", "--enforce-eager" if feature == "graph_safe" else ""
        )


def _mend(axis: str, dtype: str, allowed: tuple[Any, ...]) -> str:
    """Return the flags that make an axis one of the allowed values, "" where none do. A cache is as `dtype`, or fp8."""
    if axis != "kv_dtype":
        return f"{_FLAGS[axis]} {allowed[0]}" if axis in _FLAGS else ""
    if "float8_e4m3fn" in allowed:
        return "--kv-cache-dtype fp8_e4m3"
    fitting = [
        each
        for each in (dtype, *allowed)
        if each in allowed and each.endswith(("float16", "float32"))
    ]
    also = f" --dtype {fitting[0]}" if fitting and fitting[0] != dtype else ""
    return f"--kv-cache-dtype auto{also}" if fitting else ""


def _version(version: tuple[int, int] | None, otherwise: str) -> str:
    return otherwise if version is None else f"{version[0]}.{version[1]}"
