"""References and input generators of the ops that the core defines."""

from __future__ import annotations

from tokenspeed_core.api import OpReference
from tokenspeed_kernels.contracts.common import INPUTS, REFERENCE

_CORE_INPUTS = {
    "attention": "tokenspeed_testing.attention:make_fixture",
    **{op: f"tokenspeed_testing.inputs:{op}" for op in ("write_kv", "greedy", "sample")},
    **{
        op: f"{INPUTS}:{op}"
        for op in (
            "note_tokens",
            "mask_logits",
            "advance_rows",
            "map_tokens",
            "gather_tokens",
            "verify_drafts",
        )
    },
}
_CORE_MODULES = {
    "attention": "attention",
    "write_kv": "cache",
    "advance_rows": "cache",
    "map_tokens": "cache",
    "gather_tokens": "cache",
    "greedy": "sampling",
    "sample": "sampling",
    "note_tokens": "sampling",
    "mask_logits": "sampling",
    "verify_drafts": "sampling",
}
CORE_REFERENCES = tuple(
    OpReference(op, f"{REFERENCE}.{module}:{op}", _CORE_INPUTS[op])
    for op, module in _CORE_MODULES.items()
)
