"""The arena's pages: who holds them, which may be reused, and when.

Every page is in one of four states, and `free + cached + held + fenced == all` always:
*held* by leases, *cached* (nobody's, but its content has a name), *free*, or *fenced*: released while a
step or a transfer that may touch it is still in flight.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PageCounts:
    """Pages by state."""

    free: int
    cached: int
    held: int
    fenced: int


class PagePool:
    """Reference counts, fences and the order of eviction (least recently released first). All O(1) a page.

    Steps are fenced by their ids: a page released while step `launched` may still run becomes reusable when
    `retire` names that step.
    """

    def __init__(self, num_pages: int, forget: Callable[[int], None]) -> None:
        """Start with all pages free. `forget(page)` is called when a cached page is evicted."""
        self._forget = forget
        self._refs = [0] * num_pages
        self._stamps = [0] * num_pages  # the step that fenced the page last
        self._is_named = [False] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._fences: deque[tuple[int, int]] = deque()
        self._num_fenced = 0
        self._launched = 0
        self.retired = 0  # the last step that is over
        self.num_pages = num_pages

    def counts(self) -> PageCounts:
        """Return the number of pages in each state. Changes nothing."""
        free, cached = len(self._free), len(self._cached)
        held = self.num_pages - free - cached - self._num_fenced
        return PageCounts(free, cached, held, self._num_fenced)

    @property
    def num_available(self) -> int:
        """Pages that `take` could hand out now."""
        return len(self._free) + len(self._cached)

    def is_idle(self, page: int) -> bool:
        """Say whether a page counts in `num_available`."""
        return page in self._cached

    def take(self, num: int) -> list[int] | None:
        """Hold `num` pages, free ones first, then the longest unused; None (and no change) if there are fewer."""
        if num > self.num_available:
            return None
        pages = []
        for _ in range(num):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._cached.popitem(last=False)
                self._is_named[page] = False
                self._forget(page)
            self._refs[page] = 1
            pages.append(page)
        return pages

    def share(self, page: int) -> None:
        """Hold a page that is held, cached or fenced once more."""
        if self._refs[page] == 0:
            if page in self._cached:
                del self._cached[page]
            else:
                self._num_fenced -= 1
        self._refs[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Drop one hold of each page; the last one dropped makes it reusable once nothing in flight can touch it."""
        for page in pages:
            assert self._refs[page] > 0, f"page {page} released twice"
            self._refs[page] -= 1
            if self._refs[page]:
                continue
            self._num_fenced += 1
            if self._launched <= self.retired:  # nothing is in flight
                self._land(page)
            elif self._stamps[page] != self._launched:
                self._stamps[page] = self._launched
                self._fences.append((self._launched, page))

    def name(self, page: int) -> None:
        """Mark a held page's content as known: when released it is cached, not free."""
        self._is_named[page] = True

    def unname(self, page: int) -> None:
        """Take the name off a page, in whatever state it is."""
        self._is_named[page] = False
        if page in self._cached:
            del self._cached[page]
            self._free.append(page)

    def launch(self, step_id: int) -> None:
        """Note that a step is on its way: pages released from now on are fenced by it."""
        self._launched = step_id

    def retire(self, step_id: int) -> None:
        """Note that all steps up to this one are over; their fenced pages become cached or free."""
        self.retired = step_id
        while self._fences and self._fences[0][0] <= step_id:
            stamp, page = self._fences.popleft()
            if self._refs[page] == 0 and self._stamps[page] == stamp:
                self._stamps[page] = 0
                self._land(page)

    def _land(self, page: int) -> None:
        self._num_fenced -= 1
        if self._is_named[page]:
            self._cached[page] = None
        else:
            self._free.append(page)
