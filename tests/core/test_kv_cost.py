"""The cost of finding a prefix hit in a long context."""

from __future__ import annotations

import numpy as np
import pytest

from tokenspeed_core.api.cache_groups import FullAttention, SlidingWindow
from tokenspeed_core.api.step import I32
from tokenspeed_core.kv_cache.hashing import HashChain
from tokenspeed_core.kv_cache.manager import KVManager

FULL = FullAttention("full", 1, 1, 1)
BLOCK, WINDOW, NUM_BLOCKS = 4, 256, 1000


class CountedChain(HashChain):
    """A chain that counts the digests read."""

    num_asked = 0

    def at(self, num_tokens: int) -> bytes:
        self.num_asked += 1
        return super().at(num_tokens)


def tokens() -> I32:
    return np.arange(BLOCK * NUM_BLOCKS + 1, dtype=np.int32)


@pytest.mark.parametrize("every", [2, 40, 60, 64, 65])
def test_evicted_blocks_keep_matching_cheap(every: int) -> None:
    kv = KVManager((FULL, SlidingWindow("window", 1, 1, 1, WINDOW)), BLOCK, 3 * NUM_BLOCKS)
    chain = CountedChain(BLOCK, "", 0)
    chain.extend(tokens())
    kv.begin(1)
    lease = kv.acquire(kv.no_match())
    assert lease is not None
    assert kv.extend(lease, 0, len(tokens())) is not None
    kv.cache_full_blocks(lease, chain, BLOCK * NUM_BLOCKS, np.zeros(0, np.int32))
    for number, block in enumerate(lease.tables[1][:NUM_BLOCKS]):
        if number % every == every - 1:
            kv._evict(block)
    chain.num_asked = 0
    kv.match(chain, len(tokens()))
    assert chain.num_asked <= 6 * NUM_BLOCKS
