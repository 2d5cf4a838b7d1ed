"""Which values are kept out of training.

Every value that an answer depends on (an operand pair, a tool name, a word to copy) has a canonical
key, and a hash of that key alone assigns it to training or to the held-out set. A `Source` hands out values of one
side only and remembers their keys, so a training item cannot hold a held-out value by accident.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from random import Random

from tokenspeed_demo.items import END_OF_THINKING, Item, Message, Tool

__all__ = [
    "END_OF_THINKING",
    "HELD_OUT_SHARE",
    "Item",
    "Message",
    "Source",
    "Tool",
    "assistant",
    "is_held_out",
    "user",
]

# The share of keys of each kind that training excludes. There are only 4,095 unordered pairs of
# two-digit operands, so a large share of them is needed for a thousand held-out ones.
HELD_OUT_SHARE = {"sum": 0.3, "difference": 0.3, "tool": 0.2, "value": 0.12}


def is_held_out(key: str) -> bool:
    """Return whether training excludes `key` (`kind:value`); case is ignored."""
    kind = key.partition(":")[0]
    digest = blake2b(key.lower().encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64 < HELD_OUT_SHARE[kind]


class Source:
    """Random values of one side of the split. `keys` are those of the values drawn since `begin`."""

    def __init__(self, rng: Random, *, held_out: bool) -> None:
        self.rng = rng
        self.held_out = held_out
        self._keys: set[str] = set()

    def begin(self) -> None:
        """Start a new item without keys."""
        self._keys = set()

    @property
    def keys(self) -> frozenset[str]:
        return frozenset(self._keys)

    def draw(self, kind: str, make: Callable[[], str]) -> str:
        """Return a value from `make` on this source's side, and remember its key."""
        for _ in range(10_000):
            value = make()
            key = f"{kind}:{value}"
            if is_held_out(key) == self.held_out:
                self._keys.add(key.lower())
                return value
        raise ValueError(
            f"no {kind} value on the {'held-out' if self.held_out else 'training'} side"
        )

    def pair(self, kind: str, make: Callable[[], tuple[int, int]]) -> tuple[int, int]:
        """Return two operands. Their pair is on this source's side in either order.

        Pairs with a one-digit operand are few and belong to training alone: they are not split.
        """
        for _ in range(10_000):
            a, b = make()
            if min(a, b) < 10:
                if self.held_out:
                    continue
                return a, b
            key = f"{kind}:{min(a, b)},{max(a, b)}"
            if is_held_out(key) == self.held_out:
                self._keys.add(key)
                return a, b
        raise ValueError(
            f"no {kind} pair on the {'held-out' if self.held_out else 'training'} side"
        )


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}
