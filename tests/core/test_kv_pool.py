"""The page pool: reference counts, pending pages and the order of eviction."""

from __future__ import annotations

import random
from collections import Counter, deque
from time import perf_counter

import pytest
from engine_world import audit
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tokenspeed_core.kv_cache.pool import PageCounts, PagePool


def pool_of(num_pages: int) -> tuple[PagePool, list[int]]:
    """Return a pool and the list that its evicted pages are added to."""
    evicted: list[int] = []
    return PagePool(num_pages, evicted.append), evicted


def cached(pool: PagePool, num: int) -> list[int]:
    """Take, hash and release pages; the first is the least recently released."""
    pages = pool.take(num)
    assert pages is not None
    for page in pages:
        pool.mark_hashed(page)
    pool.release(pages)
    return pages


def test_taking_too_many_pages_does_not_change_state() -> None:
    pool, evicted = pool_of(4)
    cached(pool, 2)
    assert pool.take(5) is None
    assert pool.counts() == PageCounts(free=2, cached=2, held=0, pending=0)
    assert evicted == []


def test_free_pages_are_taken_before_cached_ones() -> None:
    pool, evicted = pool_of(4)
    named = cached(pool, 2)
    taken = pool.take(2)
    assert taken is not None
    assert not set(taken) & set(named)
    assert evicted == []


def test_least_recently_released_page_is_evicted_first() -> None:
    pool, evicted = pool_of(4)
    first, second, third, fourth = cached(pool, 4)
    pool.share(second)  # now the most recently released
    pool.release([second])
    assert pool.take(3) == [first, third, fourth]
    assert evicted == [first, third, fourth]
    assert pool.take(1) == [second]


def test_evicted_page_becomes_free_on_release() -> None:
    pool, _ = pool_of(1)
    cached(pool, 1)
    pages = pool.take(1)
    assert pages is not None
    pool.release(pages)
    assert pool.counts() == PageCounts(free=1, cached=0, held=0, pending=0)


def test_shared_page_is_held_until_its_last_release() -> None:
    pool, _ = pool_of(1)
    (page,) = cached(pool, 1)
    assert pool.is_idle(page)
    pool.share(page)
    pool.share(page)
    assert not pool.is_idle(page)
    pool.release([page])
    assert pool.counts().held == 1
    pool.release([page])
    assert pool.counts().cached == 1


def test_releasing_a_page_twice_fails() -> None:
    pool, _ = pool_of(2)
    pages = pool.take(1)
    assert pages is not None
    pool.release(pages)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(pages)


def test_unhashed_page_becomes_free_on_release() -> None:
    pool, evicted = pool_of(2)
    idle, held = cached(pool, 2)
    pool.share(held)
    pool.unmark_hashed(idle)
    pool.unmark_hashed(held)
    assert pool.counts() == PageCounts(free=1, cached=0, held=1, pending=0)
    pool.release([held])
    assert pool.counts() == PageCounts(free=2, cached=0, held=0, pending=0)
    assert evicted == []  # `on_evict` is not called


# -- pending pages ---------------------------------------------------------------------------------------


def test_page_released_during_a_step_is_pending() -> None:
    pool, _ = pool_of(1)
    pages = pool.take(1)
    assert pages is not None
    pool.launch(1)
    pool.release(pages)
    assert pool.take(1) is None
    assert pool.counts() == PageCounts(free=0, cached=0, held=0, pending=1)
    pool.retire(1)
    assert pool.take(1) == pages


def test_page_is_pending_until_the_last_launched_step() -> None:
    pool, _ = pool_of(1)
    pages = pool.take(1)
    assert pages is not None
    pool.launch(1)
    pool.launch(2)
    pool.release(pages)
    pool.retire(1)
    assert pool.take(1) is None
    pool.retire(2)
    assert pool.take(1) == pages


def test_page_released_between_steps_is_available() -> None:
    pool, _ = pool_of(1)
    pages = pool.take(1)
    assert pages is not None
    pool.launch(1)
    pool.retire(1)
    pool.release(pages)
    assert pool.take(1) == pages


def test_shared_pending_page_waits_for_its_last_release() -> None:
    pool, _ = pool_of(1)
    pages = pool.take(1)
    assert pages is not None
    pool.mark_hashed(pages[0])
    pool.launch(1)
    pool.release(pages)
    pool.share(pages[0])
    pool.launch(2)
    pool.release(pages)
    pool.retire(1)
    assert pool.counts() == PageCounts(free=0, cached=0, held=0, pending=1)
    pool.retire(2)
    assert pool.counts() == PageCounts(free=0, cached=1, held=0, pending=0)


def test_page_shared_and_released_again_is_freed_once() -> None:
    pool, _ = pool_of(1)
    pages = pool.take(1)
    assert pages is not None
    pool.launch(1)
    for _ in range(2):
        pool.release(pages)
        pool.share(pages[0])
    pool.release(pages)
    pool.retire(1)
    assert audit(pool) == PageCounts(free=1, cached=0, held=0, pending=0)


def test_pending_page_that_is_shared_stays_held() -> None:
    pool, _ = pool_of(1)
    pages = pool.take(1)
    assert pages is not None
    pool.launch(1)
    pool.release(pages)
    pool.share(pages[0])
    pool.retire(1)
    assert audit(pool) == PageCounts(free=0, cached=0, held=1, pending=0)


# -- any history ----------------------------------------------------------------------------------


class PoolMachine(RuleBasedStateMachine):
    """Compares the pool with a simple model of references and releases."""

    @initialize(num_pages=st.integers(1, 12))
    def start(self, num_pages: int) -> None:
        self.hashed: Counter[int] = Counter()  # pages of each page
        self.pool = PagePool(num_pages, self.hashed.pop)
        self.holds: dict[int, int] = {}
        self.unused: deque[int] = deque()  # cached pages, least recently released first
        self.released_at: dict[int, int] = {}  # by page: the last step launched at its release
        self.launched = self.retired = 0

    @rule(num=st.integers(0, 5))
    def take(self, num: int) -> None:
        available = self.pool.num_available
        free = self.pool.counts().free
        expected = list(self.unused)[: max(0, num - free)]
        pages = self.pool.take(num)
        if pages is None:
            assert num > available
            return
        assert num <= available
        assert pages[min(free, num) :] == expected, (
            "another page than the longest unused was evicted"
        )
        for page in pages:
            assert page not in self.holds
            assert self.released_at.get(page, 0) <= self.retired, (
                "a page was handed out while a step may touch it"
            )
            self.holds[page] = 1
        self.unused = deque(page for page in self.unused if page not in pages)

    @rule(which=st.integers(0, 99))
    @precondition(lambda self: bool(self.hashed))
    def share(self, which: int) -> None:
        page = sorted(self.hashed)[which % len(self.hashed)]
        self.pool.share(page)
        self.holds[page] = self.holds.get(page, 0) + 1
        self.unused = deque(each for each in self.unused if each != page)

    @rule(which=st.integers(0, 99))
    @precondition(lambda self: bool(self.holds))
    def release(self, which: int) -> None:
        page = sorted(self.holds)[which % len(self.holds)]
        self.pool.release([page])
        self.holds[page] -= 1
        if not self.holds[page]:
            del self.holds[page]
            self._note_release(page)

    @rule(which=st.integers(0, 99))
    @precondition(lambda self: bool(self.holds))
    def mark_hashed(self, which: int) -> None:
        page = sorted(self.holds)[which % len(self.holds)]
        self.pool.mark_hashed(page)
        self.hashed[page] += 1

    @rule(which=st.integers(0, 99))
    @precondition(lambda self: bool(self.hashed))
    def unmark_hashed(self, which: int) -> None:
        page = sorted(self.hashed)[which % len(self.hashed)]
        self.pool.unmark_hashed(page)
        self.hashed[page] -= 1
        if not self.hashed[page]:
            del self.hashed[page]
            self.unused = deque(each for each in self.unused if each != page)

    @rule()
    def launch(self) -> None:
        self.launched += 1
        self.pool.launch(self.launched)

    @rule()
    @precondition(lambda self: self.launched > self.retired)
    def retire(self) -> None:
        self.retired += 1
        self.pool.retire(self.retired)
        for page in [page for page, step in self.released_at.items() if step == self.retired]:
            self._make_available(page)

    def _note_release(self, page: int) -> None:
        if (
            self.released_at.get(page) != self.launched
        ):  # released again during the same step: it keeps its place
            self.released_at.pop(page, None)
            self.released_at[page] = self.launched
        self._make_available(page)

    def _make_available(self, page: int) -> None:
        """Note that a page is cached if nothing holds it."""
        if page in self.holds or self.released_at[page] > self.retired or page not in self.hashed:
            return
        if page not in self.unused:
            self.unused.append(page)

    @invariant()
    def every_page_is_in_one_state(self) -> None:
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


def seconds_to_reuse(num_pages: int) -> float:
    """Return the shortest time to take, hash and release 64 pages of a full pool."""
    pool, _ = pool_of(num_pages)
    order = cached(pool, num_pages)
    random.Random(0).shuffle(order)
    best = float("inf")
    for step in range(1, 16):
        start = perf_counter()
        pages = pool.take(64)
        assert pages is not None
        for page in pages:
            pool.mark_hashed(page)
        for page in (shared := [page for page in order[:128] if pool.is_idle(page)]):
            pool.share(page)
        pool.launch(step)
        pool.release(pages + shared)
        pool.retire(step)
        pool.counts()
        best = min(best, perf_counter() - start)
    return best


def test_cost_per_page_does_not_grow_with_the_pool() -> None:
    assert seconds_to_reuse(200_000) < 20 * seconds_to_reuse(200)
