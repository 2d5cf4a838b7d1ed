"""Rotary embedding of q and k, then the write into the paged cache: what the fused ops mean."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tokenspeed_core.api import Problem
from tokenspeed_kernels.reference.cache import write_kv
from tokenspeed_kernels.reference.rope import qk_norm_rope, rope

Place = Callable[..., None]


def rope_write_kv(problem: Problem) -> Place:
    """Return `rope`, then `write_kv`; k is left as it was."""
    return _composed(rope(problem), write_kv(problem))


def qk_norm_rope_write_kv(problem: Problem) -> Place:
    """Return `qk_norm_rope`, then `write_kv`; k is left as it was."""
    return _composed(qk_norm_rope(problem), write_kv(problem))


def _composed(rotate: Callable[..., None], write: Callable[..., None]) -> Place:
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
