"""Problems at the boundaries of a spec's claims.

A spec claims every value that it does not exclude, if the op defines it: the op's input generator and
reference raise ValueError for any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from tokenspeed_core.api.kernels import Capability, KernelSpec
from tokenspeed_core.api.ops import OpContract, Problem
from tokenspeed_core.kernels.refusals import problem_refusals
from tokenspeed_testing.cases import LARGEST, cases, is_sensible

_SIZES = (1, 3, 17, 257, LARGEST + 1)
_LARGE = {"vocab_size": (262_145,)}  # axes with larger values than others in practice
_ATTENTION: dict[str, tuple[int, ...]] = {
    "head_size": (8, 80, 256, 512),
    "block_size": (1, 24, 128, 256),
}
_GROUPS = ((1, 1), (5, 5), (32, 1), (48, 16), (64, 8))
_WINDOWS = (1, LARGEST)
_SOFT_CAPS = (0.125, 50.0)
_VALUE_SIZES = (1, 72, 256)
_EIGHT_BITS = "float8_e4m3fn"  # the KV cache dtype of --kv-cache-dtype fp8_e4m3


def boundary_cases(spec: KernelSpec, contract: OpContract) -> Iterator[Problem]:
    """Yield problems that a spec does not exclude, each with one unusual value on an open axis."""
    inside = next(cases(spec, contract, pairs_only=True), None)
    if inside is None:
        return
    for changed in _changes(spec.capability, contract, inside):
        problem = {**inside, **changed}
        if contract.name == "attention" and "scale" not in changed:
            problem["scale"] = problem["head_size"] ** -0.5
        if (
            problem != inside
            and is_sensible(problem)
            and not any(problem_refusals(spec.capability, problem))
        ):
            yield problem


def _open_axes(capability: Capability, axes: Iterable[str]) -> list[str]:
    """Return the axes that a capability does not bound."""
    named = {
        "kv_dtype": capability.kv_dtypes,
        "head_size": capability.head_sizes,
        "block_size": capability.block_sizes,
        "phase": capability.phases,
    }
    bounded = {axis for axis, allowed in named.items() if allowed} | {
        limit.axis for limit in capability.limits
    }
    return [axis for axis in axes if axis not in bounded]


def _changes(
    capability: Capability, contract: OpContract, inside: Problem
) -> Iterator[dict[str, Any]]:
    for axis in _open_axes(capability, inside):
        if axis == "kv_dtype":
            yield {axis: _EIGHT_BITS}
        elif contract.name == "attention":
            yield from ({axis: value} for value in _ATTENTION.get(axis, ()))
        elif type(inside[axis]) is int:  # a bool is not a size
            yield from ({axis: value} for value in (*_SIZES, *_LARGE.get(axis, ())))
    if contract.name == "attention":
        yield from ({"num_heads": queries, "num_kv_heads": keys} for queries, keys in _GROUPS)
        yield from ({"window": window} for window in _WINDOWS)
        yield from ({"soft_cap": soft_cap} for soft_cap in _SOFT_CAPS)
        yield from ({"value_head_size": size} for size in _VALUE_SIZES)
        yield {"scale": inside["scale"] / 2}  # families choose other scales
