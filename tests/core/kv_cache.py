"""A KV manager and the steps that fill it, shared by tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from tokenspeed_core.api.cache_groups import (
    CacheGroupSpec,
    CachePart,
    FullAttention,
    SlidingWindow,
)
from tokenspeed_core.api.step import I32
from tokenspeed_core.kv_cache.hashing import HashChain
from tokenspeed_core.kv_cache.lease import BlockLease
from tokenspeed_core.kv_cache.manager import KVManager

BLOCK = 4
NO_TOKENS = np.zeros(0, np.int32)  # only events read them
FULL = FullAttention("full", 1, 1, 1)
WINDOW = SlidingWindow("window", 1, 1, 1, 6)  # a query reads its own token and the five before it


@dataclass(frozen=True, slots=True)
class Chunked:
    """A custom group, as a model plugin may define it: a query reads the tokens of its chunk."""

    name: str
    chunk: int
    num_layers: int = 1

    @property
    def parts(self) -> tuple[CachePart, ...]:
        return (CachePart("latent", (3,)),)

    @property
    def window(self) -> int:
        return self.chunk

    def first_needed(self, length: int) -> int:
        return length // self.chunk * self.chunk


CHUNKED = Chunked("chunked", 13)
GROUPS: dict[str, tuple[CacheGroupSpec, ...]] = {
    "full": (FULL,),
    "window": (WINDOW,),
    "full and window": (FULL, WINDOW),
    "custom": (CHUNKED,),
    "full and custom": (FULL, CHUNKED),
    "all": (FULL, WINDOW, CHUNKED),
}


def ids(num: int, first: int = 0) -> I32:
    return np.arange(first, first + num, dtype=np.int32)


@dataclass
class Cache:
    """A manager and the id of its last step."""

    kv: KVManager
    last_step: int = 0

    @contextmanager
    def step(self, *, retires: bool = True) -> Iterator[int]:
        """Plan a step, launch it, and retire it unless `retires` is False."""
        self.last_step += 1
        step = self.last_step
        self.kv.begin(step)
        yield step
        self.kv.launch(step)
        if retires:
            self.kv.retire(step)

    def chain(self, tokens: I32, salt: str = "", adapter_id: int = 0) -> HashChain:
        chain = self.kv.chain(salt, adapter_id)
        chain.extend(tokens)
        return chain

    def admit(self, tokens: I32, salt: str = "") -> tuple[BlockLease, HashChain, int]:
        """Return a new sequence's lease, its chain and the length of its hit."""
        chain = self.chain(tokens, salt)
        match = self.kv.match(chain, len(tokens))
        lease = self.kv.acquire(match)
        return lease, chain, match.num_tokens

    def fill(self, tokens: I32, salt: str = "", chunk: int = BLOCK) -> None:
        """Compute a prompt in chunks, one per step, and release it."""
        lease: BlockLease | None = None
        start = 0
        while lease is None or start < len(tokens):
            with self.step():
                if lease is None:
                    lease, chain, start = self.admit(tokens, salt)
                end = min(start + chunk, len(tokens))
                assert self.kv.extend(lease, start, end) is not None
                self.kv.cache_full_blocks(lease, chain, end, NO_TOKENS)
                start = end
        with self.step():
            self.kv.release(lease)

    def hit(self, tokens: I32, salt: str = "") -> int:
        """Return the length of a prompt's hit."""
        return self.kv.match(self.chain(tokens, salt), len(tokens)).num_tokens


def cache(
    groups: tuple[CacheGroupSpec, ...] = (FULL,),
    num_pages: int = 60,
    *,
    prefix_caching: bool = True,
) -> Cache:
    return Cache(KVManager(groups, BLOCK, num_pages, prefix_caching=prefix_caching))
