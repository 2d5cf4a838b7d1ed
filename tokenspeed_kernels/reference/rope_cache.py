"""Rotary embedding of q and k, then the KV cache write: the reference of the fused ops."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tokenspeed_core.api import Problem
from tokenspeed_kernels.reference.cache import write_kv
from tokenspeed_kernels.reference.rope import qk_norm_rope, rope

RopeWrite = Callable[..., None]


def rope_write_kv(problem: Problem) -> RopeWrite:
    """Return `rope` followed by `write_kv`; k stays unchanged."""
    return _composed(rope(problem), write_kv(problem))


def qk_norm_rope_write_kv(problem: Problem) -> RopeWrite:
    """Return `qk_norm_rope` followed by `write_kv`; k stays unchanged."""
    return _composed(qk_norm_rope(problem), write_kv(problem))


def _composed(rotate: Callable[..., None], write: Callable[..., None]) -> RopeWrite:
    def place(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slots: Tensor,
        *rotation: Tensor | float | bool,
    ) -> None:
        turned = k.clone()
        rotate(q, turned, *rotation)
        write(turned, v, k_cache, v_cache, slots)

    return place
