"""Problems on which the conformance kit runs each common op: small, odd, and pairwise rather than crossed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tokenspeed_core.kernels.ops import Problem
from tokenspeed_core.kernels.select import problem_refusals
from tokenspeed_core.kernels.spec import KernelSpec

NUM_ROWS = (0, 1, 7, 33)

_NORMS = ({"size": 64}, {"size": 200}, {"size": 1024})
_ROPES = (
    {"num_heads": 6, "num_kv_heads": 2, "head_size": 64, "rotary_size": 64},
    {"num_heads": 5, "num_kv_heads": 1, "head_size": 48, "rotary_size": 32},
    {"num_heads": 4, "num_kv_heads": 4, "head_size": 128, "rotary_size": 128},
)
_VOCABULARIES = ({"vocab_size": 300}, {"vocab_size": 5000})
_SHAPES: dict[str, tuple[dict[str, Any], ...]] = {
    "rms_norm": _NORMS,
    "add_rms_norm": _NORMS,
    "rope": _ROPES,
    "qk_norm_rope": _ROPES,
    "silu_mul": ({"size": 100}, {"size": 1536}),
    "linear": ({"in_size": 96, "out_size": 50}, {"in_size": 256, "out_size": 512}),
    "moe_route": ({"num_experts": 12, "top_k": 3}, {"num_experts": 128, "top_k": 8}),
    "moe_experts": (
        {"num_experts": 6, "top_k": 2, "hidden_size": 40, "intermediate_size": 24},
        {"num_experts": 16, "top_k": 4, "hidden_size": 128, "intermediate_size": 96},
    ),
    "write_kv": (
        {"num_kv_heads": 3, "head_size": 24, "block_size": 8},
        {"num_kv_heads": 8, "head_size": 128, "block_size": 16},
    ),
    "greedy": _VOCABULARIES,
    "sample": _VOCABULARIES,
}


def problems(spec: KernelSpec) -> Iterator[Problem]:
    """Yield the problems of a spec's op that it declares: every shape in some dtype, every dtype somewhere.

    Raises KeyError if the op is not a common one; a plugin's op brings its own problems.
    """
    shapes = _SHAPES[spec.op]
    for index in range(max(len(shapes), len(spec.capability.dtypes))):
        dtype = spec.capability.dtypes[index % len(spec.capability.dtypes)]
        problem = {**shapes[index % len(shapes)], "dtype": dtype}
        if spec.op == "write_kv":
            problem["kv_dtype"] = dtype
        if not any(problem_refusals(spec.capability, problem)):
            yield problem
