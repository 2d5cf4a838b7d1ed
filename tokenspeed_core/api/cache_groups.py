"""Cache groups: sets of layers that keep the same tensors in the KV cache, for the same tokens of a sequence.

A group describes its layers and says which tokens they still read. It allocates nothing. All lengths are in tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Protocol

from tokenspeed_core.api.parallel import ProcessGroup


@dataclass(frozen=True, slots=True)
class CachePart:
    """A tensor that every layer of a group keeps, with values of shape `shape` for each token: [K, D] for keys.

    All parts have the dtype of the KV cache.
    """

    name: str
    shape: tuple[int, ...]


class CacheGroupSpec(Protocol):
    """A set of layers that keep the same tensors for the same tokens.

    One block is `[num_layers, parts]`, and each part of it `[block_size, *shape]`. Kernels see a part of a layer as
    `[B, block_size, *shape]`, strided on B.
    """

    @property
    def name(self) -> str:
        """The group's name, unique in its model."""

    @property
    def num_layers(self) -> int:
        """Number of layers in the group."""

    @property
    def parts(self) -> tuple[CachePart, ...]:
        """The tensors that each layer keeps, in the order in which its kernels take them."""

    @property
    def window(self) -> int | None:
        """Maximum number of tokens that a query reads, its own included. None: all tokens before it."""

    def first_needed(self, length: int) -> int:
        """Return the first token that a query at position `length` still reads."""


def values_per_token(group: CacheGroupSpec) -> int:
    """Return the number of values that all layers of a group keep for each token."""
    return group.num_layers * sum(prod(part.shape) for part in group.parts)


def keys_and_values(
    num_kv_heads: int, head_size: int, value_head_size: int | None = None
) -> tuple[CachePart, ...]:
    """Return the parts `k` and `v`, which ordinary attention layers keep. `value_head_size` None: `head_size`."""
    return (
        CachePart("k", (num_kv_heads, head_size)),
        CachePart("v", (num_kv_heads, value_head_size or head_size)),
    )


@dataclass(frozen=True, slots=True)
class FullAttention:
    """Keys and values of every token. Values have `value_head_size` elements per head, `head_size` if None."""

    name: str
    num_layers: int
    num_kv_heads: int
    head_size: int
    value_head_size: int | None = None

    @property
    def parts(self) -> tuple[CachePart, ...]:
        """Keys and values."""
        return keys_and_values(self.num_kv_heads, self.head_size, self.value_head_size)

    @property
    def window(self) -> None:
        """None: a query reads all tokens before it."""

    def first_needed(self, length: int) -> int:
        """Return 0: a query reads all tokens before it."""
        return 0


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """Keys and values of the last `window` tokens, including the query's own.

    Values have `value_head_size` elements per head, `head_size` if None.
    """

    name: str
    num_layers: int
    num_kv_heads: int
    head_size: int
    window: int
    value_head_size: int | None = None

    @property
    def parts(self) -> tuple[CachePart, ...]:
        """Keys and values."""
        return keys_and_values(self.num_kv_heads, self.head_size, self.value_head_size)

    def first_needed(self, length: int) -> int:
        """Return the first token in the window of a query at position `length`."""
        return max(0, length - self.window + 1)


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """One entry per token, which all heads share (MLA): a latent of L values, then R values of a rotated key."""

    name: str
    num_layers: int
    latent_size: int
    rope_size: int

    @property
    def parts(self) -> tuple[CachePart, ...]:
        """One entry per token."""
        return (CachePart("latent", (self.latent_size + self.rope_size,)),)

    @property
    def window(self) -> None:
        """None: a query reads all tokens before it."""

    def first_needed(self, length: int) -> int:
        """Return 0: a query reads all tokens before it."""
        return 0


def local_cache_group(group: CacheGroupSpec, processes: ProcessGroup) -> CacheGroupSpec:
    """Return the part of a group that each of these processes stores if they share the KV heads.

    With more processes than heads, several store the same head. Every process stores all latents. Raises ValueError for
    heads that cannot be divided, and for a group of another type.
    """
    num_processes = processes.size
    if num_processes == 1 or isinstance(group, LatentAttention):
        return group
    if not isinstance(group, FullAttention | SlidingWindow):
        raise ValueError(
            f"cache group {group.name!r} has no KV heads that can be divided among processes"
        )
    heads = group.num_kv_heads
    if heads % num_processes and num_processes % heads:
        raise ValueError(
            f"{heads} KV heads of cache group {group.name!r} cannot be divided among {processes}. Choose a "
            "number of processes that divides them, or is a multiple of them."
        )
    return replace(group, num_kv_heads=max(1, heads // num_processes))
