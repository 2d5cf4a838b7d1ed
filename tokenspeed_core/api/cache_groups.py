"""Cache groups: which part of a sequence's past the layers of a model still read.

A group answers questions about lengths and allocates nothing. All lengths are in tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class CacheGroupSpec(Protocol):
    """A set of layers that keep keys and values of the same tokens."""

    @property
    def name(self) -> str:
        """The group's name, unique in its model."""

    @property
    def num_layers(self) -> int:
        """Number of layers in the group."""

    def block_bytes(self, block_size: int, dtype_bytes: int) -> int:
        """Return the bytes of one block: `block_size` tokens of all layers."""

    def first_needed(self, length: int) -> int:
        """Return the first token that a query at position `length` still reads."""


@dataclass(frozen=True, slots=True)
class FullAttention:
    """Keys and values of every token. One block is `[num_layers, 2, block_size, K, D]`."""

    name: str
    num_layers: int
    num_kv_heads: int
    head_size: int

    def block_bytes(self, block_size: int, dtype_bytes: int) -> int:
        """Return the bytes of one block over all layers."""
        return self.num_layers * 2 * block_size * self.num_kv_heads * self.head_size * dtype_bytes

    def first_needed(self, length: int) -> int:
        """Return 0: a query reads all tokens before it."""
        return 0


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """Keys and values of the last `window` tokens, including the query's own."""

    name: str
    num_layers: int
    num_kv_heads: int
    head_size: int
    window: int

    def block_bytes(self, block_size: int, dtype_bytes: int) -> int:
        """Return the bytes of one block over all layers."""
        return self.num_layers * 2 * block_size * self.num_kv_heads * self.head_size * dtype_bytes

    def first_needed(self, length: int) -> int:
        """Return the first token in the window of a query at position `length`."""
        return max(0, length - self.window + 1)
