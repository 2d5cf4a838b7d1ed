"""Changes of the prefix index, collected for publication."""

from __future__ import annotations

from typing import Any

from tokenspeed_core.api.step import I32
from tokenspeed_core.kv_cache.hashing import HashChain

# ["BlockStored", [hash], parent's hash or None, token ids, block size] or ["BlockRemoved", [hash]].
Event = list[Any]


def block_hash(digest: bytes) -> int:
    """Return the hash under which a block is published: the first 8 bytes of its digest."""
    return int.from_bytes(digest[:8], "big")


class KVEventLog:
    """Collects the events of one cache group until they are taken.

    Groups that keep the whole context hold all blocks of a prefix; `group` is the first of them.
    """

    def __init__(self, group: int, block_size: int) -> None:
        self.group = group
        self._block_size = block_size
        self._events: list[Event] = []

    def stored(self, chain: HashChain, end: int, tokens: I32) -> None:
        """Add the block that ends at token `end`. The parent's digest is already in the chain."""
        start = end - self._block_size
        parent = block_hash(chain.at(start)) if start else None
        ids = tokens[start:end].tolist()
        hashes = [block_hash(chain.at(end))]
        self._events.append(["BlockStored", hashes, parent, ids, self._block_size])

    def removed(self, digest: bytes) -> None:
        """Add the removal of a block."""
        self._events.append(["BlockRemoved", [block_hash(digest)]])

    def take(self) -> list[Event]:
        """Return the events since the last call, in order."""
        events, self._events = self._events, []
        return events
