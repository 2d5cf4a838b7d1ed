"""Small problems for the common ops."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tokenspeed_core.api.kernels import KernelSpec
from tokenspeed_core.api.ops import OpContract, Problem
from tokenspeed_core.kernels.installed import installed_ops
from tokenspeed_core.kernels.refusals import problem_refusals
from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_testing.installed import installed_catalog

NUM_ROWS = (0, 1, 7, 33)

_VOCABULARIES = ({"vocab_size": 300}, {"vocab_size": 5000})
_SHAPES: dict[str, tuple[dict[str, Any], ...]] = {
    "write_kv": (
        {"num_kv_heads": 3, "head_size": 24, "value_head_size": None, "block_size": 8},
        {"num_kv_heads": 8, "head_size": 128, "value_head_size": None, "block_size": 16},
        {"num_kv_heads": 2, "head_size": 48, "value_head_size": 20, "block_size": 8},
    ),
    "greedy": _VOCABULARIES,
    "sample": _VOCABULARIES,
}


def contract_of(spec: KernelSpec) -> OpContract:
    """Return the contract of a spec's op. Raises KeyError if it is not installed."""
    return installed_ops(installed_catalog())[spec.op]


def common_contracts() -> tuple[OpContract, ...]:
    """Return the contracts of the ops that every installation has."""
    return tuple(installed_ops(Catalog([])).values())


def problems(spec: KernelSpec, contract: OpContract | None = None) -> Iterator[Problem]:
    """Yield the declared problems of a spec's op: every shape in some dtype, every dtype in some shape.

    A plugin's op declares its shapes in its contract. Raises KeyError if the op is not installed.
    """
    contract = contract or contract_of(spec)
    shapes = shapes_of(spec.op, contract)
    for index in range(max(len(shapes), len(spec.capability.dtypes))):
        dtype = spec.capability.dtypes[index % len(spec.capability.dtypes)]
        shape = {**shapes[index % len(shapes)], "dtype": dtype}
        kinds = (
            [{"kv_dtype": kind} for kind in kv_dtypes(spec, dtype)]
            if "kv_dtype" in contract.axes
            else [{}]
        )
        for problem in ({**shape, **kind} for kind in kinds):
            if not any(problem_refusals(spec.capability, problem)):
                yield problem


def shapes_of(op: str, contract: OpContract) -> tuple[Problem, ...]:
    """Return the shapes of an op, without dtypes."""
    return contract.cases or _SHAPES[op]


def kv_dtypes(spec: KernelSpec, dtype: str) -> tuple[str, ...]:
    """Return the cache dtypes for an activation dtype: the same, and declared 8-bit ones."""
    declared = spec.capability.kv_dtypes
    same = (dtype,) if not declared or dtype in declared else ()
    return (*same, *(kind for kind in declared if kind.startswith("float8")))
