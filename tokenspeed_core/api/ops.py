"""Op contracts: the class that defines an op, and the ops that the worker calls. Plugins define the ops of models.

Imports no tensor library.

An op is selected by name and *problem*: the axes that its contract lists, and `dtype`. The kernel is then called with
the tensors of its signature. Inputs are not changed unless `mutates` lists them, and results are new tensors. Tensors
may be strided in all but their last dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
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
    """The definition of an op, for its callers and its implementations."""

    name: str
    family: str
    signature: str  # arguments with shapes and dtypes, and the result
    axes: Mapping[str, str]  # of a problem, with their meaning; `dtype` is always another axis
    # "module:function": the reference implementation, and a generator of inputs. Both raise ValueError for a problem
    # that the op does not define. Empty for the core's ops, for which an OpReference names them.
    reference: str
    inputs: str
    tolerances: tuple[Tolerance, ...]
    mutates: tuple[str, ...] = ()  # arguments that are written in place
    rows: tuple[str, ...] = ()  # arguments with a leading axis of independent rows
    # The arguments that `prepare_weights` passes to a kernel once, after loading. Their first axis is that of experts.
    weights: tuple[str, ...] = ()
    # The ops that a fused op composes, in order. They run if no kernel of the fused op fits.
    parts: tuple[str, ...] = ()
    cases: tuple[Problem, ...] = ()  # problems without their dtype, for the conformance kit
    # When implementations may raise.
    errors: str = "none; shapes are checked when the model is built"

    def cut(self, axes: Problem) -> Problem:
        """Return the axes of this op from a problem that may have more."""
        return {axis: value for axis, value in axes.items() if axis in self.axes or axis == "dtype"}

    def check(self, problem: Problem) -> None:
        """Raise ValueError naming every missing and unknown axis of a problem."""
        wanted = {*self.axes, "dtype"}
        missing, surplus = sorted(wanted - problem.keys()), sorted(problem.keys() - wanted)
        if missing or surplus:
            raise ValueError(
                f"op {self.name!r}: missing {missing}, unknown {surplus}; expected axes: {sorted(wanted)}"
            )

    def tolerance(self, dtype: str) -> Tolerance:
        """Return the tolerance for a dtype. Raises KeyError if the contract does not list the dtype."""
        for tolerance in self.tolerances:
            if tolerance.dtype == dtype:
                return tolerance
        raise KeyError(f"op {self.name!r} has no tolerance for {dtype}")


def prepare_weights(kernel: Callable[..., Any], *weights: Any) -> None:
    """Let a kernel change the layout of its weights in place; call once for each layer, after its weights were loaded.

    `weights` are the arguments that the contract lists in `weights`. A kernel that needs another layout has the method
    `prepare_weights(*weights) -> None`, and gets only prepared weights later. It must prepare each expert alone, in its
    own memory, because load balancing copies prepared experts between processes. Without the method, this does nothing.
    """
    prepare = getattr(kernel, "prepare_weights", None)
    if prepare is not None:
        prepare(*weights)


@dataclass(frozen=True, slots=True)
class OpReference:
    """The reference implementation and input generator of one of the core's ops.

    The kernels' default distribution declares them in an entry of `tokenspeed.ops`; see `OpContract`.
    """

    op: str
    reference: str
    inputs: str


_SAMPLING = {"vocab_size": "entries of a row of logits, V"}
_KV = {
    "num_kv_heads": "key heads K",
    "head_size": "elements of a key head, D",
    "value_head_size": "elements of a value head, V; None: D",
    "block_size": "tokens of a block",
    "kv_dtype": "dtype of the cache",
}

_CONTRACTS = (
    OpContract(
        "write_kv",
        "cache",
        "(k [T, K, D], v [T, K, V], k_cache [B, block_size, K, D], v_cache, slots int64 [T]) -> None; a slot "
        "is block * block_size + offset, and -1 is skipped; values beyond kv_dtype become its largest; caches are "
        "strided on B",
        _KV,
        "",
        "",
        EXACT,
        mutates=("k_cache", "v_cache"),
        rows=("k", "v", "slots"),
    ),
    OpContract(
        "attention",
        "attention",
        "an AttentionFactory for an AttentionProblem, both of tokenspeed_core.api",
        {
            **_KV,
            "phase": "prefill or decode",
            "num_heads": "query heads H",
            "scale": "factor of the scores",
            "window": "number of visible positions, including the query's own; None: all",
            "is_chunked": "whether the window is the length of chunks, which begin at its multiples",
            "soft_cap": "bound c of scores, which become c * tanh(score / c); None: no bound",
            "has_sinks": "whether each query head has a learned score without a value",
            "is_bidirectional": "whether tokens of a prompt attend to later ones too, within the window on both sides",
        },
        "",
        "",
        DOTS,
    ),
    OpContract(
        "greedy",
        "sampling",
        "(logits [S, V]) -> ids int64 [S]: the argmax; the lowest id among equals",
        _SAMPLING,
        "",
        "",
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
        "",
        "",
        EXACT,
        rows=("logits", "temperature", "top_k", "top_p", "min_p", "seeds", "positions"),
    ),
    OpContract(
        "note_tokens",
        "sampling",
        "(logits [S, V], chosen int64 [S], slots int64 [S], last_token int32 [N], ids int32 [S]) -> None: ids and "
        "last_token[slots] are set to chosen, clamped to [0, V - 1], except that ids is -1 if the logit of the chosen "
        "token is not finite",
        {"vocab_size": "vocabulary size V"},
        "",
        "",
        EXACT,
        mutates=("last_token", "ids"),
        rows=("logits", "chosen", "slots", "ids"),
        cases=({"vocab_size": 300}, {"vocab_size": 5000}),
    ),
    OpContract(
        "mask_logits",
        "sampling",
        "(logits [S, V], rows int64 [P], words int32 [P, W]) -> None: logits[rows[i], v] = -inf where bit v % 32 of "
        "words[i, v // 32] is 0; rows are distinct, W = ceil(V / 32)",
        {"vocab_size": "vocabulary size V"},
        "",
        "",
        EXACT,
        mutates=("logits",),
        cases=({"vocab_size": 300}, {"vocab_size": 5024}),
    ),
    OpContract(
        "advance_rows",
        "cache",
        "(state int32 [W], words int64 [U], values int32 [U], slots int64 [R], advance int32 [R], token_ids int64 "
        "[D], positions int64 [D], seq_lens int32 [R], ends int64 [R], first, num_slots) -> None: set state[words] = "
        "values. From index `first`, state holds num_slots last tokens, then num_slots lengths. Copy the last tokens "
        "and lengths of the first D slots to token_ids and positions. Add advance to the lengths of all R slots, and "
        "copy them to seq_lens and ends. Repeated slots have advance 0, repeated words equal values",
        {},
        "",
        "",
        EXACT,
        mutates=("state", "token_ids", "positions", "seq_lens", "ends"),
        cases=({},),
    ),
    OpContract(
        "map_tokens",
        "cache",
        "(table int32 [N, B], slots int64 [R], token_slots int64 [T], positions int64 [T], rows int32 [R, B], mapping "
        "int64 [T]) -> None: rows = table[slots]; mapping = table[token_slots, positions // block_size] * block_size "
        "+ positions % block_size",
        {"block_size": "tokens per block"},
        "",
        "",
        EXACT,
        mutates=("rows", "mapping"),
        cases=({"block_size": 16}, {"block_size": 24}),
    ),
    OpContract(
        "gather_tokens",
        "cache",
        "(state int32 [W], words int64 [T], slots int64 [T], until_end int64 [T], token_ids int64 [T], positions int64 "
        "[T], new_positions int64 [T], first, num_slots) -> None: token_ids = state[words]; positions are the lengths of "
        "the slots, which state holds from index first + num_slots on, minus until_end; new_positions = positions + 1",
        {},
        "",
        "",
        EXACT,
        mutates=("token_ids", "positions", "new_positions"),
        cases=({},),
    ),
    OpContract(
        "verify_drafts",
        "sampling",
        "(ids int32 [R], token_ids int64 [T], tokens int64 [R], first int64 [S], num_drafts int64 [S], slots int64 [S], "
        "ends int32 [S], last_token int32 [N], seq_len int32 [N], num_new int32 [S], max_drafts) -> None: row s has the "
        "places first[s] to first[s] + num_drafts[s] of ids, which were chosen after token_ids[tokens]; num_drafts is at "
        "most max_drafts. It accepts its draft tokens, those that follow tokens[first[s]] in token_ids, up to the first "
        "that differs from the id chosen before it. num_new is one more than the accepted tokens a; last_token[slots] = "
        "max(0, ids[first + a]); seq_len[slots] = ends - num_drafts + a. Repeated slots have equal ends, no draft tokens, "
        "and any of their last tokens",
        {},
        "",
        "",
        EXACT,
        mutates=("last_token", "seq_len", "num_new"),
        cases=({},),
    ),
)


def common_ops() -> Mapping[str, OpContract]:
    """Return the core's own contracts by name."""
    return MappingProxyType({contract.name: contract for contract in _CONTRACTS})


def merge_ops(*more: Iterable[OpContract | OpReference]) -> Mapping[str, OpContract]:
    """Return the contracts of the core and of plugins, with the references added to the core's.

    Raises ValueError for a used name, an unknown op or another type.
    """
    merged = dict(common_ops())
    for each in (each for contracts in more for each in contracts):
        if isinstance(each, OpReference):
            contract = merged.get(each.op)
            if contract is None or contract.reference:
                raise ValueError(
                    f"OpReference of op {each.op!r}: the core has no such op, or the op already has a reference"
                )
            merged[each.op] = replace(contract, reference=each.reference, inputs=each.inputs)
        elif not isinstance(each, OpContract):
            raise ValueError(f"{each!r} is not an OpContract")
        elif each.name in merged:
            raise ValueError(f"op {each.name!r} is already defined; choose another name")
        else:
            merged[each.name] = each
    return MappingProxyType(merged)
