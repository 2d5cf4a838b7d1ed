"""Contracts of rotary embeddings, alone and fused with the write to the KV cache."""

from __future__ import annotations

from tokenspeed_core.api import OpContract
from tokenspeed_kernels.contracts.common import INPUTS, REFERENCE, ROUNDING

_HEADS = {
    "num_heads": "query heads H",
    "num_kv_heads": "KV heads K",
    "head_size": "head size D",
    "rotary_size": "leading elements of a head that are rotated, R <= D, even",
}

_CACHE = {"block_size": "tokens per block", "kv_dtype": "dtype of the cache"}

_ROPES = (
    {"num_heads": 6, "num_kv_heads": 2, "head_size": 64, "rotary_size": 64},
    {"num_heads": 5, "num_kv_heads": 1, "head_size": 48, "rotary_size": 32},
    {"num_heads": 4, "num_kv_heads": 4, "head_size": 128, "rotary_size": 128},
)

ROPE = (
    OpContract(
        "rope",
        "rope",
        "(q [T, H, D], k [T, K, D], positions int64 [T], cos_sin float32 [P, R], interleaved: bool) -> None; "
        "in place; a row of cos_sin is R/2 cosines, then R/2 sines; pairs are (0, 1), (2, 3), … if interleaved, else "
        "(0, R/2), (1, R/2 + 1), …",
        _HEADS,
        f"{REFERENCE}.rope:rope",
        f"{INPUTS}:rope",
        ROUNDING,
        mutates=("q", "k"),
        rows=("q", "k", "positions"),
        cases=_ROPES,
    ),
    OpContract(
        "qk_norm_rope",
        "rope",
        "(q [T, H, D], k [T, K, D], q_weight [D], k_weight [D], eps, positions int64 [T], "
        "cos_sin float32 [P, R], interleaved: bool) -> None: rms_norm of each head, then rope, in place",
        _HEADS,
        f"{REFERENCE}.rope:qk_norm_rope",
        f"{INPUTS}:qk_norm_rope",
        ROUNDING,
        mutates=("q", "k"),
        rows=("q", "k", "positions"),
        parts=("rms_norm", "rope"),
        cases=_ROPES,
    ),
)


def _write(rotation: str, arguments: str) -> OpContract:
    name = f"{rotation}_write_kv"
    return OpContract(
        name,
        "cache",
        "(q [T, H, D], k [T, K, D], v [T, K, D], k_cache [B, block_size, K, D], v_cache, slots int64 [T], "
        f"{arguments}) -> None: {rotation} of q in place, {rotation} of k into the cache, v into the cache like write_kv",
        {**_HEADS, **_CACHE},
        f"{REFERENCE}.rope_cache:{name}",
        f"{INPUTS}:{name}",
        ROUNDING,
        mutates=("q", "k_cache", "v_cache"),
        rows=("q", "k", "v", "slots", "positions"),
        parts=(rotation, "write_kv"),
        cases=tuple({**case, "block_size": 16} for case in _ROPES),
    )


ROPE_CACHE = (
    _write("rope", "positions, cos_sin, interleaved"),
    _write("qk_norm_rope", "q_weight [D], k_weight [D], eps, positions, cos_sin, interleaved"),
)
