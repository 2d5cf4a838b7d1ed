"""The block pool: reference counts, pending blocks and the order of eviction."""

from __future__ import annotations

import random
from collections import deque
from time import perf_counter

import pytest
from engine_world import audit
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tokenspeed_core.kv_cache.pool import BlockCounts, BlockPool


def pool_of(num_blocks: int) -> tuple[BlockPool, list[int]]:
    """Return a pool and the list that its evicted blocks are added to."""
    evicted: list[int] = []
    return BlockPool(num_blocks, evicted.append), evicted


def cached(pool: BlockPool, num: int) -> list[int]:
    """Take, hash and release blocks; the first is the least recently released."""
    blocks = pool.take(num)
    assert blocks is not None
    for block in blocks:
        pool.mark_hashed(block)
    pool.release(blocks)
    return blocks


def test_taking_too_many_blocks_changes_nothing() -> None:
    pool, evicted = pool_of(4)
    cached(pool, 2)
    assert pool.take(5) is None
    assert pool.counts() == BlockCounts(free=2, cached=2, held=0, pending=0)
    assert evicted == []


def test_free_blocks_are_taken_before_cached_ones() -> None:
    pool, evicted = pool_of(4)
    named = cached(pool, 2)
    taken = pool.take(2)
    assert taken is not None
    assert not set(taken) & set(named)
    assert evicted == []


def test_least_recently_released_block_is_evicted_first() -> None:
    pool, evicted = pool_of(4)
    first, second, third, fourth = cached(pool, 4)
    pool.share(second)  # now the most recently released
    pool.release([second])
    assert pool.take(3) == [first, third, fourth]
    assert evicted == [first, third, fourth]
    assert pool.take(1) == [second]


def test_evicted_block_becomes_free_on_release() -> None:
    pool, _ = pool_of(1)
    cached(pool, 1)
    blocks = pool.take(1)
    assert blocks is not None
    pool.release(blocks)
    assert pool.counts() == BlockCounts(free=1, cached=0, held=0, pending=0)


def test_shared_block_is_held_until_its_last_release() -> None:
    pool, _ = pool_of(1)
    (block,) = cached(pool, 1)
    assert pool.is_idle(block)
    pool.share(block)
    pool.share(block)
    assert not pool.is_idle(block)
    pool.release([block])
    assert pool.counts().held == 1
    pool.release([block])
    assert pool.counts().cached == 1


def test_releasing_a_block_twice_fails() -> None:
    pool, _ = pool_of(2)
    blocks = pool.take(1)
    assert blocks is not None
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(blocks)


def test_unhashed_block_becomes_free_on_release() -> None:
    pool, evicted = pool_of(2)
    idle, held = cached(pool, 2)
    pool.share(held)
    pool.unmark_hashed(idle)
    pool.unmark_hashed(held)
    assert pool.counts() == BlockCounts(free=1, cached=0, held=1, pending=0)
    pool.release([held])
    assert pool.counts() == BlockCounts(free=2, cached=0, held=0, pending=0)
    assert evicted == []  # `on_evict` is not called


# -- pending blocks ---------------------------------------------------------------------------------------


def test_block_released_during_a_step_is_pending() -> None:
    pool, _ = pool_of(1)
    blocks = pool.take(1)
    assert blocks is not None
    pool.launch(1)
    pool.release(blocks)
    assert pool.take(1) is None
    assert pool.counts() == BlockCounts(free=0, cached=0, held=0, pending=1)
    pool.retire(1)
    assert pool.take(1) == blocks


def test_block_is_pending_until_the_last_launched_step() -> None:
    pool, _ = pool_of(1)
    blocks = pool.take(1)
    assert blocks is not None
    pool.launch(1)
    pool.launch(2)
    pool.release(blocks)
    pool.retire(1)
    assert pool.take(1) is None
    pool.retire(2)
    assert pool.take(1) == blocks


def test_block_released_between_steps_is_available() -> None:
    pool, _ = pool_of(1)
    blocks = pool.take(1)
    assert blocks is not None
    pool.launch(1)
    pool.retire(1)
    pool.release(blocks)
    assert pool.take(1) == blocks


def test_shared_pending_block_waits_for_its_last_release() -> None:
    pool, _ = pool_of(1)
    blocks = pool.take(1)
    assert blocks is not None
    pool.mark_hashed(blocks[0])
    pool.launch(1)
    pool.release(blocks)
    pool.share(blocks[0])
    pool.launch(2)
    pool.release(blocks)
    pool.retire(1)
    assert pool.counts() == BlockCounts(free=0, cached=0, held=0, pending=1)
    pool.retire(2)
    assert pool.counts() == BlockCounts(free=0, cached=1, held=0, pending=0)


def test_block_shared_and_released_again_is_freed_once() -> None:
    pool, _ = pool_of(1)
    blocks = pool.take(1)
    assert blocks is not None
    pool.launch(1)
    for _ in range(2):
        pool.release(blocks)
        pool.share(blocks[0])
    pool.release(blocks)
    pool.retire(1)
    assert audit(pool) == BlockCounts(free=1, cached=0, held=0, pending=0)


def test_pending_block_that_is_shared_stays_held() -> None:
    pool, _ = pool_of(1)
    blocks = pool.take(1)
    assert blocks is not None
    pool.launch(1)
    pool.release(blocks)
    pool.share(blocks[0])
    pool.retire(1)
    assert audit(pool) == BlockCounts(free=0, cached=0, held=1, pending=0)


# -- any history ----------------------------------------------------------------------------------


class PoolMachine(RuleBasedStateMachine):
    """Compares the pool with a simple model of references and releases."""

    @initialize(num_blocks=st.integers(1, 12))
    def start(self, num_blocks: int) -> None:
        self.hashed: set[int] = set()
        self.pool = BlockPool(num_blocks, self.hashed.remove)
        self.holds: dict[int, int] = {}
        self.unused: deque[int] = deque()  # cached blocks, least recently released first
        self.released_at: dict[int, int] = {}  # by block: the last step launched at its release
        self.launched = self.retired = 0

    @rule(num=st.integers(0, 5))
    def take(self, num: int) -> None:
        available = self.pool.num_available
        free = self.pool.counts().free
        expected = list(self.unused)[: max(0, num - free)]
        blocks = self.pool.take(num)
        if blocks is None:
            assert num > available
            return
        assert num <= available
        assert blocks[min(free, num) :] == expected, (
            "another block than the longest unused was evicted"
        )
        for block in blocks:
            assert block not in self.holds
            assert self.released_at.get(block, 0) <= self.retired, (
                "a block was handed out while a step may touch it"
            )
            self.holds[block] = 1
        self.unused = deque(block for block in self.unused if block not in blocks)

    @rule(which=st.integers(0, 99))
    @precondition(lambda self: bool(self.hashed))
    def share(self, which: int) -> None:
        block = sorted(self.hashed)[which % len(self.hashed)]
        self.pool.share(block)
        self.holds[block] = self.holds.get(block, 0) + 1
        self.unused = deque(each for each in self.unused if each != block)

    @rule(which=st.integers(0, 99))
    @precondition(lambda self: bool(self.holds))
    def release(self, which: int) -> None:
        block = sorted(self.holds)[which % len(self.holds)]
        self.pool.release([block])
        self.holds[block] -= 1
        if not self.holds[block]:
            del self.holds[block]
            self._note_release(block)

    @rule(which=st.integers(0, 99))
    @precondition(lambda self: bool(self.holds))
    def mark_hashed(self, which: int) -> None:
        block = sorted(self.holds)[which % len(self.holds)]
        self.pool.mark_hashed(block)
        self.hashed.add(block)

    @rule(which=st.integers(0, 99))
    @precondition(lambda self: bool(self.hashed))
    def unmark_hashed(self, which: int) -> None:
        block = sorted(self.hashed)[which % len(self.hashed)]
        self.pool.unmark_hashed(block)
        self.hashed.remove(block)
        self.unused = deque(each for each in self.unused if each != block)

    @rule()
    def launch(self) -> None:
        self.launched += 1
        self.pool.launch(self.launched)

    @rule()
    @precondition(lambda self: self.launched > self.retired)
    def retire(self) -> None:
        self.retired += 1
        self.pool.retire(self.retired)
        for block in [block for block, step in self.released_at.items() if step == self.retired]:
            self._make_available(block)

    def _note_release(self, block: int) -> None:
        if (
            self.released_at.get(block) != self.launched
        ):  # released again during the same step: it keeps its place
            self.released_at.pop(block, None)
            self.released_at[block] = self.launched
        self._make_available(block)

    def _make_available(self, block: int) -> None:
        """Note that a block is cached if nothing holds it."""
        if (
            block in self.holds
            or self.released_at[block] > self.retired
            or block not in self.hashed
        ):
            return
        if block not in self.unused:
            self.unused.append(block)

    @invariant()
    def every_block_is_in_one_state(self) -> None:
        if hasattr(self, "pool"):
            counts = audit(self.pool)
            assert counts.held == len(self.holds)
            assert counts.cached == len(self.unused)


TestAnyHistory = PoolMachine.TestCase
TestAnyHistory.settings = settings(
    max_examples=150,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


# -- cost -----------------------------------------------------------------------------------------


def seconds_to_reuse(num_blocks: int) -> float:
    """Return the shortest time to take, hash and release 64 blocks of a full pool."""
    pool, _ = pool_of(num_blocks)
    order = cached(pool, num_blocks)
    random.Random(0).shuffle(order)
    best = float("inf")
    for step in range(1, 16):
        start = perf_counter()
        blocks = pool.take(64)
        assert blocks is not None
        for block in blocks:
            pool.mark_hashed(block)
        for block in (shared := [block for block in order[:128] if pool.is_idle(block)]):
            pool.share(block)
        pool.launch(step)
        pool.release(blocks + shared)
        pool.retire(step)
        pool.counts()
        best = min(best, perf_counter() - start)
    return best


def test_cost_per_block_does_not_grow_with_the_pool() -> None:
    assert seconds_to_reuse(200_000) < 20 * seconds_to_reuse(200)
