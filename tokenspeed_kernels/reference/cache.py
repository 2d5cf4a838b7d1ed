"""Writing keys and values into the paged cache."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tokenspeed_core.api import Problem


def as_bytes(x: Tensor) -> Tensor:
    """Return a view of eight-bit floats as bytes, which torch can index; other tensors as they are."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def _narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype.itemsize > 1:
        return x.to(dtype)
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype)


def write_kv(problem: Problem) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]:
    """Return `write(k [T, K, D], v, k_cache [B, block_size, K, D], v_cache, slots [T]) -> None`.

    A slot of -1 writes nothing; values beyond the cache's type become its largest. On a CUDA device the skip waits
    for the device.
    """
    block_size: int = problem["block_size"]

    def write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        if slots.numel() and slots.min() < 0:
            kept = slots >= 0
            k, v, slots = k[kept], v[kept], slots[kept]
        index = (slots // block_size, slots % block_size)
        for cache, new in ((k_cache, k), (v_cache, v)):
            as_bytes(cache).index_put_(index, as_bytes(_narrowed(new, cache.dtype)))

    return write
