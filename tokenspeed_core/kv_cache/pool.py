"""Reference counts of the KV cache's pages, and the order in which pages are reused.

Every page is in one of four states, and the four counts always add up to the size of the pool:

* *held*: at least one lease uses a block of the page.
* *cached*: no lease uses it, and the prefix index knows the content of at least one of its blocks.
* *free*: no lease uses it, and its content is unknown.
* *pending*: it was released while a step that may access it was in flight.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PageCounts:
    """Number of pages in each state."""

    free: int
    cached: int
    held: int
    pending: int


@dataclass(frozen=True, slots=True)
class _Pending:
    """A released page and the last step that may access it."""

    step_id: int
    page: int


class PagePool:
    """Hands out free pages first, then the least recently released cached ones. O(1) per page.

    A page released while steps are in flight can be reused once the last of them is retired.
    """

    def __init__(self, num_pages: int, on_evict: Callable[[int], None]) -> None:
        """Start with all pages free. `on_evict(page)` is called when a cached page is handed out."""
        self.num_pages = num_pages
        self.last_retired = 0  # id of the last step that finished
        self._last_launched = 0
        self._on_evict = on_evict
        self._refs = [0] * num_pages
        self._released_at = [0] * num_pages  # last step launched at the page's last release
        self._num_hashed = [0] * num_pages  # blocks of the page in the prefix index
        self._free = list(range(num_pages - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._pending: deque[_Pending] = deque()
        self._num_pending = 0

    def counts(self) -> PageCounts:
        """Return the number of pages in each state."""
        free, cached = len(self._free), len(self._cached)
        held = self.num_pages - free - cached - self._num_pending
        return PageCounts(free, cached, held, self._num_pending)

    @property
    def num_available(self) -> int:
        """Pages that `take` can hand out now."""
        return len(self._free) + len(self._cached)

    def is_idle(self, page: int) -> bool:
        """Whether a page with an indexed block is counted in `num_available`."""
        return page in self._cached

    def take(self, num: int) -> list[int] | None:
        """Hold `num` pages, with one reference each. Returns None and changes nothing if fewer are available."""
        if num > self.num_available:
            return None
        pages = []
        for _ in range(num):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._cached.popitem(last=False)
                self._num_hashed[page] = 0
                self._on_evict(page)
            self._refs[page] = 1
            pages.append(page)
        return pages

    def share(self, page: int, num: int = 1) -> None:
        """Add references to a page that is held, cached or pending."""
        if self._refs[page] == 0:
            if page in self._cached:
                del self._cached[page]
            else:
                self._num_pending -= 1
        self._refs[page] += num

    def release(self, pages: Iterable[int]) -> None:
        """Drop one reference for each entry of `pages`."""
        for page in pages:
            assert self._refs[page] > 0, f"page {page} released twice"
            self._refs[page] -= 1
            if self._refs[page]:
                continue
            self._num_pending += 1
            if self._last_launched <= self.last_retired:  # nothing is in flight
                self._make_available(page)
            elif self._released_at[page] != self._last_launched:
                self._released_at[page] = self._last_launched
                self._pending.append(_Pending(self._last_launched, page))

    def mark_hashed(self, page: int) -> None:
        """Count an indexed block of a held page: when released, the page becomes cached instead of free."""
        self._num_hashed[page] += 1

    def unmark_hashed(self, page: int) -> None:
        """Count one indexed block less. The page may be in any state."""
        self._num_hashed[page] -= 1
        if not self._num_hashed[page] and page in self._cached:
            del self._cached[page]
            self._free.append(page)

    def launch(self, step_id: int) -> None:
        """Record the launch of a step."""
        self._last_launched = step_id

    def retire(self, step_id: int) -> None:
        """Record that all steps up to `step_id` have finished, and free the pages that waited for them."""
        self.last_retired = step_id
        while self._pending and self._pending[0].step_id <= step_id:
            pending = self._pending.popleft()
            page = pending.page
            if self._refs[page] == 0 and self._released_at[page] == pending.step_id:
                self._released_at[page] = 0
                self._make_available(page)

    def _make_available(self, page: int) -> None:
        self._num_pending -= 1
        if self._num_hashed[page]:
            self._cached[page] = None
        else:
            self._free.append(page)
