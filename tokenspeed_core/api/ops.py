"""Op contracts, and those of the ops that the worker itself calls. Plugins provide the ops of models.

No tensor library is imported.

An op is selected by name and *problem*: the axes that its contract lists, and `dtype`. The kernel is then called with
the tensors of its signature. Inputs are not changed unless `mutates` lists them, and results are new tensors. Tensors
may be strided in all but their last dimension.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

Problem = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The allowed error against the reference in float32: |out - ref| <= absolute + relative * |ref|.

    `source` says where the numbers come from.
    """

    dtype: str
    relative: float
    absolute: float
    source: str


DOTS = (
    Tolerance("float32", 2e-3, 2e-3, "matrix units round float32 inputs to 11 bits (tf32)"),
    Tolerance("bfloat16", 3e-2, 3e-2, "inputs of 8 bits, probabilities rounded once more"),
    Tolerance("float16", 6e-3, 6e-3, "inputs of 11 bits, probabilities rounded once more"),
)
EXACT = tuple(
    Tolerance(dtype, 0.0, 0.0, "the values are copied or chosen, not computed")
    for dtype in ("float32", "bfloat16", "float16")
)


@dataclass(frozen=True, slots=True)
class OpContract:
    """The definition of an op, for its callers and its implementations.

    `axes` maps each axis of the problem to its meaning (`dtype` is always one); `mutates` are arguments written in
    place; `rows` are arguments with a leading axis of independent rows; `errors` says when an implementation may raise;
    `reference` and `inputs` are "module:function": the reference implementation, and a generator of inputs for a
    problem. `parts` are the ops that a fused op composes, in order; they run if no kernel of the fused op fits. `cases`
    are problems, without their dtype, for the conformance kit.
    """

    name: str
    family: str
    signature: str
    axes: Mapping[str, str]
    reference: str
    inputs: str
    tolerances: tuple[Tolerance, ...]
    mutates: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    cases: tuple[Problem, ...] = ()
    errors: str = "none: shapes are the caller's duty, checked when the model is built"

    def cut(self, axes: Problem) -> Problem:
        """Return the axes that this op has."""
        return {axis: value for axis, value in axes.items() if axis in self.axes or axis == "dtype"}

    def check(self, problem: Problem) -> None:
        """Raise ValueError naming every missing and unknown axis of a problem."""
        wanted = {*self.axes, "dtype"}
        missing, surplus = sorted(wanted - problem.keys()), sorted(problem.keys() - wanted)
        if missing or surplus:
            raise ValueError(
                f"op {self.name!r}: missing {missing}, unknown {surplus}; its problem is {sorted(wanted)}"
            )

    def tolerance(self, dtype: str) -> Tolerance:
        """Return the tolerance for a dtype; raises KeyError if the contract has none."""
        for tolerance in self.tolerances:
            if tolerance.dtype == dtype:
                return tolerance
        raise KeyError(f"op {self.name!r} has no tolerance for {dtype}")


_SAMPLING = {"vocab_size": "entries of a row of logits, V"}
_KV = {
    "num_kv_heads": "key heads K",
    "head_size": "elements of a head, D",
    "block_size": "tokens of a block",
    "kv_dtype": "dtype of the cache",
}

_CONTRACTS = (
    OpContract(
        "write_kv",
        "cache",
        "(k [T, K, D], v [T, K, D], k_cache [B, block_size, K, D], v_cache, slots int64 [T]) -> None; a slot "
        "is block * block_size + offset, and -1 is skipped; values beyond kv_dtype become its largest; caches are "
        "strided on B",
        _KV,
        "tokenspeed_kernels.reference.cache:write_kv",
        "tokenspeed_testing.inputs:write_kv",
        EXACT,
        mutates=("k_cache", "v_cache"),
        rows=("k", "v", "slots"),
    ),
    OpContract(
        "attention",
        "attention",
        "an AttentionFactory of tokenspeed_core.api, whose problem is an AttentionProblem",
        {
            **_KV,
            "phase": "prefill or decode",
            "num_heads": "query heads H",
            "scale": "factor of the scores",
            "window": "number of visible positions, including the query's own; None: all",
        },
        "tokenspeed_kernels.reference.attention:attention",
        "tokenspeed_testing.attention:make_fixture",
        DOTS,
    ),
    OpContract(
        "greedy",
        "sampling",
        "(logits [S, V]) -> ids int64 [S]: the largest, the lowest id among equals",
        _SAMPLING,
        "tokenspeed_kernels.reference.sampling:greedy",
        "tokenspeed_testing.inputs:greedy",
        EXACT,
        rows=("logits",),
    ),
    OpContract(
        "sample",
        "sampling",
        "(logits float32 [S, V], temperature float32 [S], top_k int32 [S], top_p float32 [S], min_p "
        "float32 [S], seeds int64 [S], positions int64 [S]) -> ids int64 [S]: temperature 0 is greedy; top_k 0 "
        "keeps all; the token is where the cumulative probability, in descending order and by lower id among equals, "
        "passes a uniform number that depends on seed and position alone",
        _SAMPLING,
        "tokenspeed_kernels.reference.sampling:sample",
        "tokenspeed_testing.inputs:sample",
        EXACT,
        rows=("logits", "temperature", "top_k", "top_p", "min_p", "seeds", "positions"),
    ),
)


def common_ops() -> Mapping[str, OpContract]:
    """Return the core's own contracts by name."""
    return MappingProxyType({contract.name: contract for contract in _CONTRACTS})


def merge_ops(*more: Iterable[OpContract]) -> Mapping[str, OpContract]:
    """Return the core's contracts with those of plugins. Raises ValueError for a used name or another type."""
    merged = dict(common_ops())
    for contract in (contract for contracts in more for contract in contracts):
        if not isinstance(contract, OpContract):
            raise ValueError(f"{contract!r} is not an OpContract")
        if contract.name in merged:
            raise ValueError(f"op {contract.name!r} is already defined; choose another name")
        merged[contract.name] = contract
    return MappingProxyType(merged)
