"""Cache groups: what a sequence keeps of its past, in blocks, and where a prefix may resume.

A group answers questions about lengths only. Nothing here allocates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class CacheGroupSpec(Protocol):
    """What the KV manager asks of a group. All lengths are in tokens."""

    @property
    def name(self) -> str:
        """The group's name in the model, unique in it."""

    @property
    def num_layers(self) -> int:
        """Layers that keep their state in this group."""

    @property
    def is_recurrent(self) -> bool:
        """Whether it keeps a state, rewritten each step, with checkpoints; else keys and values of tokens."""

    def block_bytes(self, block_size: int, dtype_bytes: int) -> int:
        """Return the bytes of one block: `block_size` tokens of all layers (or one state of all layers)."""

    def first_needed(self, length: int) -> int:
        """Return the first token whose cache entry a query at position `length` still reads."""


@dataclass(frozen=True, slots=True)
class FullAttention:
    """Keys and values of every token. One block is `[num_layers, 2, block_size, K, D]`."""

    name: str
    num_layers: int
    num_kv_heads: int
    head_size: int

    @property
    def is_recurrent(self) -> bool:
        """False: it keeps keys and values of tokens."""
        return False

    def block_bytes(self, block_size: int, dtype_bytes: int) -> int:
        """Return the bytes of one block over all layers."""
        return self.num_layers * 2 * block_size * self.num_kv_heads * self.head_size * dtype_bytes

    def first_needed(self, length: int) -> int:
        """Return 0: every token stays needed."""
        return 0


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """Keys and values of the last `window` tokens, the query's own among them."""

    name: str
    num_layers: int
    num_kv_heads: int
    head_size: int
    window: int

    @property
    def is_recurrent(self) -> bool:
        """False: it keeps keys and values of tokens."""
        return False

    def block_bytes(self, block_size: int, dtype_bytes: int) -> int:
        """Return the bytes of one block over all layers."""
        return self.num_layers * 2 * block_size * self.num_kv_heads * self.head_size * dtype_bytes

    def first_needed(self, length: int) -> int:
        """Return the first token inside the window of a query at position `length`."""
        return max(0, length - self.window + 1)


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """A state that each token rewrites; checkpoints of it, one per block of tokens, let a prefix resume."""

    name: str
    num_layers: int
    state_bytes: int  # of one layer's state of one sequence

    @property
    def is_recurrent(self) -> bool:
        """True: it keeps a state."""
        return True

    def block_bytes(self, block_size: int, dtype_bytes: int) -> int:
        """Return the bytes of one state over all layers; block size and dtype do not matter."""
        return self.num_layers * self.state_bytes

    def first_needed(self, length: int) -> int:
        """Return `length`: only the state at the query's own position is read."""
        return length
