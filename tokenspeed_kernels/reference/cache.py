"""Writing keys and values into the paged cache."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tokenspeed_core.api import Problem


def write_kv(problem: Problem) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]:
    """Return `write(k [T, K, D], v, k_cache [B, block_size, K, D], v_cache, slots [T]) -> None`.

    A slot of -1 writes nothing. On a CUDA device the skip waits for the device.
    """
    block_size: int = problem["block_size"]

    def write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        if slots.numel() and slots.min() < 0:
            kept = slots >= 0
            k, v, slots = k[kept], v[kept], slots[kept]
        index = (slots // block_size, slots % block_size)
        k_cache.index_put_(index, k.to(k_cache.dtype))
        v_cache.index_put_(index, v.to(v_cache.dtype))

    return write
