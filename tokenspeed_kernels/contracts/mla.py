"""Contracts of the ops of multi-head latent attention (MLA, DeepSeek-V2, arXiv:2405.04434).

A token's cache entry is its latent (L values) and its rotated key part (R values), which all heads share. A head's
key is the latent's expansion (N values), then the rotated part; its value is another expansion (V values).
"""

from __future__ import annotations

from tokenspeed_core.api import DOTS, EXACT, OpContract, Tolerance
from tokenspeed_kernels.contracts.common import REFERENCE, ROUNDING

_REFERENCE, _INPUTS = f"{REFERENCE}.mla", "tokenspeed_kernels.mla_inputs"
_LATENT = {"num_heads": "query heads H", "latent_size": "values of a latent, L"}
_ROPE = {"rope_size": "rotated values of a query and of a key, R, even"}
_NOPE = {"nope_size": "values of a query and of a key that are not rotated, N"}
_VALUE = {"value_size": "values of a head's value, V"}
_CACHE = {"block_size": "tokens of a block", "kv_dtype": "dtype of the cache"}
_SHARED = {"block_size": "tokens of a block"}

_SMALL = {"num_heads": 5, "latent_size": 48, "rope_size": 16, "nope_size": 32, "value_size": 24}
_LITE = {"num_heads": 16, "latent_size": 512, "rope_size": 64, "nope_size": 128, "value_size": 128}
_MANY = {**_LITE, "num_heads": 128}


def _cases(
    axes: dict[str, str], *sizes: dict[str, int], phase: str = ""
) -> tuple[dict[str, object], ...]:
    """Return conformance problems of an op with these axes."""
    more: dict[str, object] = {"phase": phase} if phase else {}
    return tuple(
        {
            **{axis: value for axis, value in each.items() if axis in axes},
            **({"block_size": block_size} if "block_size" in axes else {}),
            **more,
        }
        for each, block_size in zip(sizes, (8, 64, 32, 64), strict=False)
    )


_WRITTEN = {**_LATENT, **_ROPE, **_NOPE, **_CACHE}
_ABSORBED = {**_LATENT, **_ROPE, **_NOPE, **_VALUE}
_PROJECTED = {**_LATENT, **_NOPE, **_VALUE}
_DECODED = {**_LATENT, **_ROPE, **_CACHE, "phase": "decode"}
_PREFILLED = {**_ABSORBED, **_CACHE, "phase": "prefill"}

_ENTRIES = (
    *(each for each in ROUNDING if each.dtype == "float32"),
    *(
        Tolerance(
            dtype, 0.13, 2e-2, "in an FP8 cache, a value halfway between two codes, 1/8 apart"
        )
        for dtype in ("bfloat16", "float16")
    ),
)

MLA = (
    OpContract(
        "mla_write",
        "cache",
        "(q [T, H, N + R], kv [T, L + R], norm_weight [L], eps, positions int64 [T], cos_sin float32 [P, R], interleaved, "
        "cache [B, block_size, L + R], slots int64 [T], kv_scale: float) -> None: q[..., N:] and kv[:, L:] are rotated "
        "like the op rope, q in place; the entry at slots[t] is rms_norm(kv[t, :L]), then the rotated part, both divided "
        "by kv_scale; slots and the range of kv_dtype as in write_kv; the cache is strided on B",
        _WRITTEN,
        f"{_REFERENCE}:mla_write",
        f"{_INPUTS}:mla_write",
        _ENTRIES,
        mutates=("q", "cache"),
        rows=("q", "kv", "positions", "slots"),
        cases=_cases(_WRITTEN, _SMALL, _LITE),
    ),
    OpContract(
        "mla_absorb",
        "linear",
        "(q [T, H, N + R], kv_up [H, N + V, L]) -> y [T, H, L + R]: q[..., :N] @ kv_up[:, :N], then q[..., N:]",
        _ABSORBED,
        f"{_REFERENCE}:mla_absorb",
        f"{_INPUTS}:mla_absorb",
        DOTS,
        rows=("q",),
        cases=_cases(_ABSORBED, _SMALL, _LITE),
    ),
    OpContract(
        "mla_project",
        "linear",
        "(x [T, H, L], kv_up [H, N + V, L], out [T, H, V]) -> None: out = x @ kv_up[:, N:].T",
        _PROJECTED,
        f"{_REFERENCE}:mla_project",
        f"{_INPUTS}:mla_project",
        DOTS,
        mutates=("out",),
        rows=("x", "out"),
        cases=_cases(_PROJECTED, _SMALL, _LITE),
    ),
    OpContract(
        "find_shared_prefix",
        "cache",
        "(block_table int32 [S, M], seq_lens int32 [S]) -> shared int32 [2 + S]: the number of tokens in the leading "
        "blocks that a group of rows shares; a row whose table starts with these blocks; and for each row the number, or "
        "0 if it is not in the group. At least one token of each row is not counted. The search prefers the group for "
        "which reading its tokens once saves most, but it compares rows at a few depths only and may miss that group. "
        "All values are 0 for fewer than 9 rows in the group, fewer than 256 shared tokens, or fewer than 262,144 tokens "
        "times rows, because reading them once does not pay. The result is None if no table of this shape can reach "
        "these minimums. Table entries past a row's length may hold anything",
        _SHARED,
        f"{REFERENCE}.cache:find_shared_prefix",
        f"{_INPUTS}:find_shared_prefix",
        EXACT,
        cases=_cases(_SHARED, {}, {}),
    ),
    OpContract(
        "mla_decode",
        "attention",
        "(q [T, H, L + R], cache [B, block_size, L + R], block_table int32 [T, M], seq_lens int32 [T], max_seq_len: "
        "int, scale: float, shared) -> y [T, H, L]: one query per row; all heads attend to the row's seq_lens cache "
        "entries, and the first L values of an entry are its value: softmax(scale * q . entries) @ entries[:, :L], zeros "
        "where seq_lens is 0. seq_lens <= max_seq_len. Blocks and table entries past a row's length may hold anything. q "
        "is from mla_absorb. The cache is strided on B. shared is the result of find_shared_prefix for these rows, or "
        "None; a backend with the feature shared_prefix reads the entries in shared blocks once for all rows of the group. "
        "A kernel may have a method plan(), which is called once per step; all layers then get its "
        "result instead of shared",
        _DECODED,
        f"{_REFERENCE}:mla_decode",
        f"{_INPUTS}:mla_decode",
        DOTS,
        rows=("q", "block_table", "seq_lens"),
        errors="ValueError: more rows than the backend supports",
        cases=_cases(_DECODED, _SMALL, _LITE, {**_LITE, "num_heads": 7}, _MANY, phase="decode"),
    ),
    OpContract(
        "mla_prefill",
        "attention",
        "(q [T, H, N + R], cache [B, block_size, L + R], kv_up [H, N + V, L], query_start int32 [S + 1], seq_lens int32 "
        "[S], block_table int32 [S, M], host_query_start, host_seq_lens, max_expanded: int, scale: float, out [T, H, V]) "
        "-> None: causal attention of rows; the arguments are fields of AttentionStep; out is zero for rows of "
        "length 0 and for queries after query_start[S]. A key is kv_up[h, :N] @ entry[:L], then entry[L:]; a value is "
        "kv_up[h, N:] @ entry[:L]. A backend that expands entries before the step's own does so for at most max_expanded "
        "of them at a time. Blocks and table entries past a row's length may hold anything",
        _PREFILLED,
        f"{_REFERENCE}:mla_prefill",
        f"{_INPUTS}:mla_prefill",
        DOTS,
        mutates=("out",),
        cases=_cases(_PREFILLED, _SMALL, _LITE, phase="prefill"),
    ),
)
