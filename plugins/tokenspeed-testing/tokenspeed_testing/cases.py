"""The problems that a kernel declares, and the nearest problems that it must reject.

On a CPU every pair of declared values occurs in some problem; on a GPU every combination.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any
from unittest import SkipTest

from tokenspeed_core.api.kernels import DTYPES, PHASES, AxisLimit, KernelSpec
from tokenspeed_core.api.ops import OpContract, Problem
from tokenspeed_core.kernels.refusals import problem_refusals
from tokenspeed_testing.shapes import kv_dtypes, shapes_of

LARGEST = 4096  # larger cases cost memory and time without finding more
_GROUPS = ((4, 2), (7, 1), (3, 3), (16, 2))
_HEAD_SIZES, _BLOCK_SIZES = (64, 32, 96, 128), (16, 64, 32, 8)
_PLAIN: dict[str, Any] = {
    "window": None,
    "is_chunked": False,
    "soft_cap": None,
    "has_sinks": False,
    "value_head_size": None,
    "is_bidirectional": False,
}
# The problems that need a feature of attention.
_FEATURES: dict[str, dict[str, Any]] = {
    "window": {"window": 20},
    "chunked": {"window": 20, "is_chunked": True},
    "soft_cap": {"soft_cap": 1.0},
    "sinks": {"has_sinks": True},
    "value_head_size": {"value_head_size": 48},
    "bidirectional": {"is_bidirectional": True},
}


class NotRun(SkipTest):
    """Declared cases that this machine cannot run: their number, and the missing requirements."""

    def __init__(self, num_cases: int, needs: str) -> None:
        """Store both."""
        super().__init__(f"{num_cases} cases need {needs}")
        self.num_cases, self.needs = num_cases, needs


def cases(spec: KernelSpec, contract: OpContract, *, pairs_only: bool) -> Iterator[Problem]:
    """Yield declared problems once each: every pair of declared values, or every combination."""
    axes = _attention_axes(spec) if contract.name == "attention" else _axes(spec, contract)
    seen: list[Problem] = []
    for chosen in covering(axes) if pairs_only else _combinations(axes):
        problem = {key: value for part in chosen.values() for key, value in part}
        if contract.name == "attention":
            problem["scale"] = problem["head_size"] ** -0.5
        if (
            problem not in seen
            and is_sensible(problem)
            and not any(problem_refusals(spec.capability, problem))
        ):
            seen.append(problem)
            yield problem


def covering(axes: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Yield choices of a value per axis until every pair of values occurred together."""
    index = {axis: range(len(values)) for axis, values in axes.items()}
    left = {
        ((a, i), (b, j)) for a, b in combinations(axes, 2) for i in index[a] for j in index[b]
    } or {((a, i), (a, i)) for a in axes for i in index[a]}
    while left:
        row = dict(min(left))
        for axis in axes:
            if axis not in row:
                row[axis] = max(
                    index[axis], key=lambda i: len(left & set(_pairs({**row, axis: i}, axes)))
                )
        left -= set(_pairs(row, axes))
        yield {axis: axes[axis][i] for axis, i in row.items()}


def beyond(spec: KernelSpec, contract: OpContract) -> Iterator[tuple[str, Problem]]:
    """Yield a problem that exceeds one limit, and the name of that limit in the refusal, for every limit.

    Raises AssertionError for a limit on an axis that the op does not have.
    """
    inside = next(cases(spec, contract, pairs_only=True), None)
    assert inside is not None, (
        f"{spec.backend} declares no problem of op {spec.op!r} that the kit can make"
    )
    capability = spec.capability
    for limit in capability.limits:
        assert limit.axis in contract.axes, (
            f"{spec.backend} bounds the axis {limit.axis!r}, which op {spec.op!r} does not have. "
            f"Its axes: {', '.join(sorted(contract.axes))}."
        )
        for value in outside(limit):
            yield f"{limit.axis} {value}", {**inside, limit.axis: value}
    for axis, allowed, others in (
        ("dtype", capability.dtypes, DTYPES),
        ("kv_dtype", capability.kv_dtypes, DTYPES),
        ("phase", capability.phases, PHASES),
        ("head_size", capability.head_sizes, _neighbors(capability.head_sizes)),
        ("block_size", capability.block_sizes, _neighbors(capability.block_sizes)),
    ):
        if axis in inside and allowed:
            yield from (
                (f"{axis} {value}", {**inside, axis: value})
                for value in others
                if value not in allowed
            )
    if contract.name == "attention":
        for feature, needing in _FEATURES.items():
            if feature not in capability.features:
                yield f"the feature {feature}", {**inside, **needing}


def outside(limit: AxisLimit) -> Iterator[int]:
    """Yield a value just beyond each end of a limit."""
    step = limit.multiple_of
    lowest = -(-limit.minimum // step) * step
    if lowest - step > 0:
        yield lowest - step
    if limit.maximum is not None:
        yield (limit.maximum // step + 1) * step
    if step > 1:
        yield lowest + step + 1


def _axes(spec: KernelSpec, contract: OpContract) -> dict[str, list[tuple[tuple[str, Any], ...]]]:
    """Return the axes of an op with the values to try: shapes, ends of limits, dtypes."""
    shapes = [dict(shape) for shape in shapes_of(spec.op, contract)]
    corners = [
        {**shape, limit.axis: value}
        for limit in spec.capability.limits
        for value in _inside(limit)
        for shape in shapes[:1]
        if limit.axis in shape
    ]
    return {
        "shape": [tuple(shape.items()) for shape in (*shapes, *corners)],
        "types": [
            tuple(types.items()) for types in _types(spec, has_cache="kv_dtype" in contract.axes)
        ],
    }


def _attention_axes(spec: KernelSpec) -> dict[str, list[tuple[tuple[str, Any], ...]]]:
    capability = spec.capability
    bounded = {limit.axis: tuple(_inside(limit)) for limit in capability.limits}
    heads = capability.head_sizes or (*_HEAD_SIZES, *bounded.get("head_size", ()))
    blocks = capability.block_sizes or (*_BLOCK_SIZES, *bounded.get("block_size", ()))
    claimed = [needing for name, needing in _FEATURES.items() if name in capability.features]
    features = [{}, *claimed]
    for other in ("bidirectional", "chunked"):  # no layer is both
        some = [needing for needing in claimed if needing != _FEATURES[other]]
        together = {axis: value for needing in some for axis, value in needing.items()}
        if together not in features:
            features.append(together)
    return {
        "phase": [(("phase", phase),) for phase in capability.phases or PHASES],
        "types": [tuple(types.items()) for types in _types(spec, has_cache=True)],
        "head_size": [(("head_size", size),) for size in heads],
        "block_size": [(("block_size", size),) for size in blocks],
        "groups": [(("num_heads", queries), ("num_kv_heads", keys)) for queries, keys in _GROUPS],
        "features": [tuple({**_PLAIN, **needing}.items()) for needing in features],
    }


def _types(spec: KernelSpec, *, has_cache: bool) -> Iterator[dict[str, str]]:
    for dtype in spec.capability.dtypes:
        if has_cache:
            yield from ({"dtype": dtype, "kv_dtype": kind} for kind in kv_dtypes(spec, dtype))
        else:
            yield {"dtype": dtype}


def _inside(limit: AxisLimit) -> Iterator[int]:
    """Yield the values at the ends of a limit, up to a size that is cheap to try."""
    step = limit.multiple_of
    lowest = max(step, -(-limit.minimum // step) * step)
    yield lowest
    if limit.maximum is not None and lowest < limit.maximum // step * step <= LARGEST:
        yield limit.maximum // step * step


def _neighbors(sizes: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted({each for size in sizes for each in (size - 1, size + 1) if each > 0}))


def is_sensible(problem: Problem) -> bool:
    """Return whether a problem is consistent, for example top_k <= num_experts."""
    return bool(
        problem.get("top_k", 0) <= problem.get("num_experts", problem.get("top_k", 0))
        and problem.get("rotary_size", 0) <= problem.get("head_size", problem.get("rotary_size", 0))
        and problem.get("num_heads", 0) % problem.get("num_kv_heads", 1) == 0
    )


def _combinations(axes: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    return (dict(zip(axes, values, strict=True)) for values in product(*axes.values()))


def _pairs(
    row: Mapping[str, int], axes: Mapping[str, Any]
) -> Iterator[tuple[tuple[str, int], tuple[str, int]]]:
    known = [(axis, row[axis]) for axis in axes if axis in row]
    return combinations(known, 2) if len(axes) > 1 else ((each, each) for each in known)
