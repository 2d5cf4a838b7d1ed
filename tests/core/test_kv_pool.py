"""Blocks: who holds them, when they may be handed out again, and which goes first."""

from __future__ import annotations

import random
from collections import deque
from time import perf_counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from null_world import audit

from tokenspeed_core.kv_cache.pool import BlockCounts, BlockPool


def pool_of(num_blocks: int) -> tuple[BlockPool, list[int]]:
    """Return a pool, and the list of blocks that it evicts."""
    evicted: list[int] = []
    return BlockPool(num_blocks, evicted.append), evicted


def cached(pool: BlockPool, num: int) -> list[int]:
    """Take blocks, name them and let them go: the first is the longest unused."""
    blocks = pool.take(num)
    assert blocks is not None
    for block in blocks:
        pool.name(block)
    pool.release(blocks)
    return blocks


def test_taking_more_than_there_are_changes_nothing() -> None:
    pool, evicted = pool_of(4)
    cached(pool, 2)
    assert pool.take(5) is None
    assert pool.counts() == BlockCounts(free=2, cached=2, held=0, pending=0)
    assert evicted == []


def test_free_blocks_go_before_cached_ones() -> None:
    pool, evicted = pool_of(4)
    named = cached(pool, 2)
    taken = pool.take(2)
    assert taken is not None
    assert not set(taken) & set(named)
    assert evicted == []


def test_the_longest_unused_cached_block_is_evicted_first() -> None:
    pool, evicted = pool_of(4)
    first, second, third, fourth = cached(pool, 4)
    pool.share(second)  # used again, so it comes last
    pool.release([second])
    assert pool.take(3) == [first, third, fourth]
    assert evicted == [first, third, fourth]
    assert pool.take(1) == [second]


def test_an_evicted_block_is_free_when_it_is_released() -> None:
    pool, _ = pool_of(1)
    cached(pool, 1)
    blocks = pool.take(1)
    assert blocks is not None
    pool.release(blocks)
    assert pool.counts() == BlockCounts(free=1, cached=0, held=0, pending=0)


def test_a_shared_block_is_held_until_everybody_lets_it_go() -> None:
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


def test_releasing_a_block_twice_is_our_own_mistake() -> None:
    pool, _ = pool_of(2)
    blocks = pool.take(1)
    assert blocks is not None
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(blocks)


def test_a_block_that_loses_its_name_is_free_once_nobody_holds_it() -> None:
    pool, evicted = pool_of(2)
    idle, held = cached(pool, 2)
    pool.share(held)
    pool.unname(idle)
    pool.unname(held)
    assert pool.counts() == BlockCounts(free=1, cached=0, held=1, pending=0)
    pool.release([held])
    assert pool.counts() == BlockCounts(free=2, cached=0, held=0, pending=0)
    assert evicted == []  # its owner knows already


# -- fences ---------------------------------------------------------------------------------------


def test_a_block_released_while_a_step_runs_is_not_handed_out_before_the_step_is_over() -> None:
    pool, _ = pool_of(1)
    blocks = pool.take(1)
    assert blocks is not None
    pool.launch(1)
    pool.release(blocks)
    assert pool.take(1) is None
    assert pool.counts() == BlockCounts(free=0, cached=0, held=0, pending=1)
    pool.retire(1)
    assert pool.take(1) == blocks


def test_the_last_step_launched_is_the_one_that_fences() -> None:
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


def test_a_block_released_between_steps_is_there_at_once() -> None:
    pool, _ = pool_of(1)
    blocks = pool.take(1)
    assert blocks is not None
    pool.launch(1)
    pool.retire(1)
    pool.release(blocks)
    assert pool.take(1) == blocks


def test_a_pending_block_that_is_shared_again_obeys_only_the_later_fence() -> None:
    pool, _ = pool_of(1)
    blocks = pool.take(1)
    assert blocks is not None
    pool.name(blocks[0])
    pool.launch(1)
    pool.release(blocks)
    pool.share(blocks[0])
    pool.launch(2)
    pool.release(blocks)
    pool.retire(1)
    assert pool.counts() == BlockCounts(free=0, cached=0, held=0, pending=1)
    pool.retire(2)
    assert pool.counts() == BlockCounts(free=0, cached=1, held=0, pending=0)


def test_a_block_released_twice_under_one_step_comes_back_once() -> None:
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


def test_a_held_block_stays_held_when_the_step_that_once_pending_it_is_over() -> None:
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
    """Beside a model that remembers, for each block, when it was let go and who reads it."""

    @initialize(num_blocks=st.integers(1, 12))
    def start(self, num_blocks: int) -> None:
        self.names: set[int] = set()
        self.pool = BlockPool(num_blocks, self.names.remove)
        self.holds: dict[int, int] = {}
        self.unused: deque[int] = (
            deque()
        )  # named blocks that may be evicted, the longest unused first
        self.let_go: dict[int, int] = {}  # block: the last step launched when its last hold ended
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
            assert self.let_go.get(block, 0) <= self.retired, (
                "a block was handed out while a step may touch it"
            )
            self.holds[block] = 1
        self.unused = deque(block for block in self.unused if block not in blocks)

    @rule(which=st.integers(0, 99))
    @precondition(lambda self: bool(self.names))
    def share(self, which: int) -> None:
        block = sorted(self.names)[which % len(self.names)]
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
            self._let_go(block)

    @rule(which=st.integers(0, 99))
    @precondition(lambda self: bool(self.holds))
    def name(self, which: int) -> None:
        block = sorted(self.holds)[which % len(self.holds)]
        self.pool.name(block)
        self.names.add(block)

    @rule(which=st.integers(0, 99))
    @precondition(lambda self: bool(self.names))
    def unname(self, which: int) -> None:
        block = sorted(self.names)[which % len(self.names)]
        self.pool.unname(block)
        self.names.remove(block)
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
        for block in [block for block, step in self.let_go.items() if step == self.retired]:
            self._land(block)

    def _let_go(self, block: int) -> None:
        if (
            self.let_go.get(block) != self.launched
        ):  # once more under the same step: its place in line stays
            self.let_go.pop(block, None)
            self.let_go[block] = self.launched
        self._land(block)

    def _land(self, block: int) -> None:
        """Note that a block may be evicted from now on, if nothing holds it back."""
        if block in self.holds or self.let_go[block] > self.retired or block not in self.names:
            return
        if block not in self.unused:
            self.unused.append(block)

    @invariant()
    def every_block_is_in_one_state(self) -> None:
        if hasattr(self, "pool"):
            counts = audit(self.pool)
            assert counts.held == len(self.holds)
            assert counts.cached == len(self.unused)


TestAnyHistoryOfBlocks = PoolMachine.TestCase
TestAnyHistoryOfBlocks.settings = settings(
    max_examples=150,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


# -- cost -----------------------------------------------------------------------------------------


def seconds_to_reuse(num_blocks: int) -> float:
    """Return the least time in which 64 blocks of a full cache are evicted, named, pending and let go."""
    pool, _ = pool_of(num_blocks)
    order = cached(pool, num_blocks)
    random.Random(0).shuffle(order)
    best = float("inf")
    for step in range(1, 16):
        start = perf_counter()
        blocks = pool.take(64)
        assert blocks is not None
        for block in blocks:
            pool.name(block)
        for block in (shared := [block for block in order[:128] if pool.is_idle(block)]):
            pool.share(block)
        pool.launch(step)
        pool.release(blocks + shared)
        pool.retire(step)
        pool.counts()
        best = min(best, perf_counter() - start)
    return best


def test_a_block_costs_the_same_in_a_pool_a_thousand_times_as_large() -> None:
    assert seconds_to_reuse(200_000) < 20 * seconds_to_reuse(200)
