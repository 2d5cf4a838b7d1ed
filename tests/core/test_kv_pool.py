"""Pages: who holds them, when they may be handed out again, and which goes first."""

from __future__ import annotations

import random
from collections import deque
from time import perf_counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from null_world import audit

from tokenspeed_core.kv_cache.pool import PageCounts, PagePool


def pool_of(num_pages: int) -> tuple[PagePool, list[int]]:
    """Return a pool, and the list of pages that it evicts."""
    evicted: list[int] = []
    return PagePool(num_pages, evicted.append), evicted


def cached(pool: PagePool, num: int) -> list[int]:
    """Take pages, name them and let them go: the first is the longest unused."""
    pages = pool.take(num)
    assert pages is not None
    for page in pages:
        pool.name(page)
    pool.release(pages)
    return pages


def test_taking_more_than_there_are_changes_nothing() -> None:
    pool, evicted = pool_of(4)
    cached(pool, 2)
    assert pool.take(5) is None
    assert pool.counts() == PageCounts(free=2, cached=2, held=0, fenced=0)
    assert evicted == []


def test_free_pages_go_before_cached_ones() -> None:
    pool, evicted = pool_of(4)
    named = cached(pool, 2)
    taken = pool.take(2)
    assert taken is not None
    assert not set(taken) & set(named)
    assert evicted == []


def test_the_longest_unused_cached_page_is_evicted_first() -> None:
    pool, evicted = pool_of(4)
    first, second, third, fourth = cached(pool, 4)
    pool.share(second)  # used again, so it comes last
    pool.release([second])
    assert pool.take(3) == [first, third, fourth]
    assert evicted == [first, third, fourth]
    assert pool.take(1) == [second]


def test_an_evicted_page_is_free_when_it_is_released() -> None:
    pool, _ = pool_of(1)
    cached(pool, 1)
    pages = pool.take(1)
    assert pages is not None
    pool.release(pages)
    assert pool.counts() == PageCounts(free=1, cached=0, held=0, fenced=0)


def test_a_shared_page_is_held_until_everybody_lets_it_go() -> None:
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


def test_releasing_a_page_twice_is_our_own_mistake() -> None:
    pool, _ = pool_of(2)
    pages = pool.take(1)
    assert pages is not None
    pool.release(pages)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(pages)


def test_a_page_that_loses_its_name_is_free_once_nobody_holds_it() -> None:
    pool, evicted = pool_of(2)
    idle, held = cached(pool, 2)
    pool.share(held)
    pool.unname(idle)
    pool.unname(held)
    assert pool.counts() == PageCounts(free=1, cached=0, held=1, fenced=0)
    pool.release([held])
    assert pool.counts() == PageCounts(free=2, cached=0, held=0, fenced=0)
    assert evicted == []  # its owner knows already


# -- fences ---------------------------------------------------------------------------------------


def test_a_page_released_while_a_step_runs_is_not_handed_out_before_the_step_is_over() -> None:
    pool, _ = pool_of(1)
    pages = pool.take(1)
    assert pages is not None
    pool.launch(1)
    pool.release(pages)
    assert pool.take(1) is None
    assert pool.counts() == PageCounts(free=0, cached=0, held=0, fenced=1)
    pool.retire(1)
    assert pool.take(1) == pages


def test_the_last_step_launched_is_the_one_that_fences() -> None:
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


def test_a_page_released_between_steps_is_there_at_once() -> None:
    pool, _ = pool_of(1)
    pages = pool.take(1)
    assert pages is not None
    pool.launch(1)
    pool.retire(1)
    pool.release(pages)
    assert pool.take(1) == pages


def test_a_fenced_page_that_is_shared_again_obeys_only_the_later_fence() -> None:
    pool, _ = pool_of(1)
    pages = pool.take(1)
    assert pages is not None
    pool.name(pages[0])
    pool.launch(1)
    pool.release(pages)
    pool.share(pages[0])
    pool.launch(2)
    pool.release(pages)
    pool.retire(1)
    assert pool.counts() == PageCounts(free=0, cached=0, held=0, fenced=1)
    pool.retire(2)
    assert pool.counts() == PageCounts(free=0, cached=1, held=0, fenced=0)


def test_a_page_released_twice_under_one_step_comes_back_once() -> None:
    pool, _ = pool_of(1)
    pages = pool.take(1)
    assert pages is not None
    pool.launch(1)
    for _ in range(2):
        pool.release(pages)
        pool.share(pages[0])
    pool.release(pages)
    pool.retire(1)
    assert audit(pool) == PageCounts(free=1, cached=0, held=0, fenced=0)


def test_a_held_page_stays_held_when_the_step_that_once_fenced_it_is_over() -> None:
    pool, _ = pool_of(1)
    pages = pool.take(1)
    assert pages is not None
    pool.launch(1)
    pool.release(pages)
    pool.share(pages[0])
    pool.retire(1)
    assert audit(pool) == PageCounts(free=0, cached=0, held=1, fenced=0)


# -- any history ----------------------------------------------------------------------------------


class PoolMachine(RuleBasedStateMachine):
    """Beside a model that remembers, for each page, when it was let go and who reads it."""

    @initialize(num_pages=st.integers(1, 12))
    def start(self, num_pages: int) -> None:
        self.names: set[int] = set()
        self.pool = PagePool(num_pages, self.names.remove)
        self.holds: dict[int, int] = {}
        self.unused: deque[int] = (
            deque()
        )  # named pages that may be evicted, the longest unused first
        self.let_go: dict[int, int] = {}  # page: the last step launched when its last hold ended
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
            assert self.let_go.get(page, 0) <= self.retired, (
                "a page was handed out while a step may touch it"
            )
            self.holds[page] = 1
        self.unused = deque(page for page in self.unused if page not in pages)

    @rule(which=st.integers(0, 99))
    @precondition(lambda self: bool(self.names))
    def share(self, which: int) -> None:
        page = sorted(self.names)[which % len(self.names)]
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
            self._let_go(page)

    @rule(which=st.integers(0, 99))
    @precondition(lambda self: bool(self.holds))
    def name(self, which: int) -> None:
        page = sorted(self.holds)[which % len(self.holds)]
        self.pool.name(page)
        self.names.add(page)

    @rule(which=st.integers(0, 99))
    @precondition(lambda self: bool(self.names))
    def unname(self, which: int) -> None:
        page = sorted(self.names)[which % len(self.names)]
        self.pool.unname(page)
        self.names.remove(page)
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
        for page in [page for page, step in self.let_go.items() if step == self.retired]:
            self._land(page)

    def _let_go(self, page: int) -> None:
        if (
            self.let_go.get(page) != self.launched
        ):  # once more under the same step: its place in line stays
            self.let_go.pop(page, None)
            self.let_go[page] = self.launched
        self._land(page)

    def _land(self, page: int) -> None:
        """Note that a page may be evicted from now on, if nothing holds it back."""
        if page in self.holds or self.let_go[page] > self.retired or page not in self.names:
            return
        if page not in self.unused:
            self.unused.append(page)

    @invariant()
    def every_page_is_in_one_state(self) -> None:
        if hasattr(self, "pool"):
            counts = audit(self.pool)
            assert counts.held == len(self.holds)
            assert counts.cached == len(self.unused)


TestAnyHistoryOfPages = PoolMachine.TestCase
TestAnyHistoryOfPages.settings = settings(
    max_examples=150,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


# -- cost -----------------------------------------------------------------------------------------


def seconds_to_reuse(num_pages: int) -> float:
    """Return the least time in which 64 pages of a full cache are evicted, named, fenced and let go."""
    pool, _ = pool_of(num_pages)
    order = cached(pool, num_pages)
    random.Random(0).shuffle(order)
    best = float("inf")
    for step in range(1, 16):
        start = perf_counter()
        pages = pool.take(64)
        assert pages is not None
        for page in pages:
            pool.name(page)
        for page in (shared := [page for page in order[:128] if pool.is_idle(page)]):
            pool.share(page)
        pool.launch(step)
        pool.release(pages + shared)
        pool.retire(step)
        pool.counts()
        best = min(best, perf_counter() - start)
    return best


def test_a_page_costs_the_same_in_a_pool_a_thousand_times_as_large() -> None:
    assert seconds_to_reuse(200_000) < 20 * seconds_to_reuse(200)
