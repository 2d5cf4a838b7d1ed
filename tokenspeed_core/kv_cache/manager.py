"""Finds prefix hits, grows block tables, and puts full blocks into the prefix index.

The manager does not decide which sequence runs. `match` and `num_pages_needed` answer questions and change nothing;
`acquire` and `extend` take blocks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from tokenspeed_core.api.cache_groups import CacheGroupSpec
from tokenspeed_core.api.step import I32
from tokenspeed_core.kv_cache.events import KVEventLog
from tokenspeed_core.kv_cache.hashing import HashChain
from tokenspeed_core.kv_cache.lease import ABSENT, BlockLease
from tokenspeed_core.kv_cache.match import NO_ENTRIES, Match, TableEntries
from tokenspeed_core.kv_cache.page_layout import (
    UNLIMITED,
    blocks_of_pages,
    max_pages_held,
    pages_of_blocks,
)
from tokenspeed_core.kv_cache.pool import PageCounts, PagePool
from tokenspeed_core.kv_cache.prefix_index import IndexedBlock, PrefixIndex

MAX_ENTRIES_AT_ONCE = 4096  # of a lease that is released at once; each takes about 0.5 us
_NEVER_FULL = 2**31 - 1  # tokens per hash when prefix caching is off: no block is ever hashed


class KVManager:
    """The cache groups of a model over one pool of pages.

    A page holds `blocks_per_page` blocks of one group, all of one sequence: block `i` of the group is in page
    `i // blocks_per_page`. Each entry of a block table, and each spare block, holds one reference to its page.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroupSpec],
        block_size: int,
        num_pages: int,
        *,
        blocks_per_page: Sequence[int] | None = None,
        max_chunk: int | None = None,
        prefix_caching: bool = True,
    ) -> None:
        """Start empty. `block_size` is in tokens and the same for all groups. `blocks_per_page` is 1 by default.

        A step computes at most `max_chunk` tokens of a sequence (None: any number).
        """
        self.groups = tuple(groups)
        self.num_groups = len(self.groups)
        self.block_size = block_size
        self.granularity = block_size if prefix_caching else _NEVER_FULL
        self.pool = PagePool(num_pages, self._evict)
        self._blocks_per_page = tuple(blocks_per_page or (1,) * self.num_groups)
        self._max_pages = tuple(
            max_pages_held(group, block_size, per_page, max_chunk)
            for group, per_page in zip(self.groups, self._blocks_per_page, strict=True)
        )
        self.has_windows = any(group.window is not None for group in self.groups)
        """Whether `extend` may drop blocks."""
        self._is_page_a_block = set(self._blocks_per_page) == {1}
        self._is_one_to_one = self._is_page_a_block and self.num_groups == 1
        self._hits_always_fit = self._is_page_a_block and min(self._max_pages) == UNLIMITED
        num_blocks = blocks_of_pages(num_pages, self._blocks_per_page, self._max_pages)
        self.max_sequence_len = num_blocks * block_size
        """Tokens of the longest sequence that fits into the whole pool."""
        self._group_of_page = [0] * num_pages  # of the pages in use
        self.index = PrefixIndex(self.num_groups)
        self._unreleased: deque[BlockLease] = deque()  # of ended sequences

    def collect_events(self) -> KVEventLog:
        """Collect changes of the prefix index from now on."""
        whole = (i for i, group in enumerate(self.groups) if group.window is None)
        self.index.events = events = KVEventLog(next(whole, 0), self.block_size)
        return events

    def counts(self) -> PageCounts:
        """Return the number of the pool's pages in each state."""
        return self.pool.counts()

    def chain(self, salt: str, adapter_id: int) -> HashChain:
        """Return an empty hash chain."""
        return HashChain(self.granularity, salt, adapter_id)

    # -- queries --------------------------------------------------------------------------------------

    @property
    def has_prefix_cache(self) -> bool:
        """Whether prefix caching is on."""
        return self.granularity == self.block_size

    def max_capacity(self, lease: BlockLease) -> int:
        """Return the capacity to which the available pages can extend a lease."""
        num_available = self.pool.num_available
        if self._is_page_a_block:
            return lease.capacity + num_available // self.num_groups * self.block_size
        sizes = range((num_available + 1) * max(self._blocks_per_page) + 1)
        fits = bisect_right(
            sizes, num_available, key=lambda num: sum(self._num_missing(lease, num))
        )
        return lease.capacity + (fits - 1) * self.block_size

    def _num_missing(self, lease: BlockLease, num_blocks: int) -> list[int]:
        """Return how many pages of each group must be taken to extend a lease by `num_blocks` blocks."""
        return [
            max(0, -((len(spare) - num_blocks) // per_page))
            for per_page, spare in zip(self._blocks_per_page, lease.spare, strict=True)
        ]

    def match(self, chain: HashChain, num_tokens: int) -> Match:
        """Find the longest hashed prefix, shorter than `num_tokens`, at which every group can resume."""
        size = self.block_size
        length = min(chain.num_tokens, (num_tokens - 1) // size * size)
        if length <= 0:
            return self.no_match()
        partial: list[int] = []  # groups that need only the last part of the prefix
        for i, group in enumerate(self.groups):
            if group.first_needed(length) == 0:
                length = self._resumable((i,), chain, length)
            else:
                partial.append(i)
        # Every length between the two needs the missing block.
        while length > 0 and (shorter := self._resumable(partial, chain, length)) < length:
            length = shorter
        if length <= 0:
            return self.no_match()
        entries = tuple(self._hit_entries(i, chain, length) for i in range(self.num_groups))
        num_idle = sum(self.pool.is_idle(page) for page in self._pages_of_hit(entries))
        return Match(length, entries, num_idle)

    def can_hold(self, match: Match, num_tokens: int) -> bool:
        """Whether the whole pool is large enough for a sequence of `num_tokens` tokens with this hit.

        It may not be for a long sequence: blocks of a hit can be spread over partly used pages.
        """
        if self._hits_always_fit:
            return True
        num_hit = sum(1 for _ in self._pages_of_hit(match.entries))
        return num_hit + self.num_pages_needed(match.num_tokens, num_tokens) <= self.pool.num_pages

    def _pages_of_hit(self, entries: Iterable[TableEntries]) -> Iterator[int]:
        """Yield the different pages of a hit's blocks."""
        for per_page, hit in zip(self._blocks_per_page, entries, strict=True):
            yield from hit.blocks if per_page == 1 else {block // per_page for block in hit.blocks}

    def no_match(self) -> Match:
        """Return a match of no tokens."""
        return Match(0, (NO_ENTRIES,) * self.num_groups, 0)

    def num_pages_needed(self, start: int, end: int) -> int:
        """Return the most pages that a sequence resuming at token `start` takes at once for its tokens up to `end`."""
        num_blocks = max(0, -(-end // self.block_size) - start // self.block_size)
        return pages_of_blocks(num_blocks, self._blocks_per_page, self._max_pages)

    def num_new_pages(self, resumed: I32, capacity: I32, end: I32) -> I32:
        """Return the pages that sequences need for their tokens up to `end`, as columns.

        They resumed at token `resumed`, and their block tables have room for `capacity` tokens.
        """
        missing: I32 = np.maximum(-((capacity - end) // self.block_size), 0)
        if self._is_page_a_block:
            missing *= self.num_groups
            return missing
        num_own = (capacity - resumed) // self.block_size
        num_pages = np.zeros_like(missing)
        for per_page in self._blocks_per_page:
            num_pages += -(-(num_own + missing) // per_page) + -num_own // per_page
        return num_pages

    def num_promised_pages(self, resumed: I32, capacity: I32, end: I32) -> int:
        """Return the number of pages that these sequences still need for their tokens up to `end`.

        The columns are those of `num_new_pages`.
        """
        num_own = (capacity - resumed) // self.block_size
        num_all = -((resumed - end) // self.block_size)
        num_pages = 0
        for per_page, most in zip(self._blocks_per_page, self._max_pages, strict=True):
            needed = np.minimum(-(-num_all // per_page), most)
            held = np.minimum(-(-num_own // per_page), most)
            num_pages += int(np.maximum(needed - held, 0).sum())
        return num_pages

    def num_held_pages(self, lease: BlockLease) -> int:
        """Return the number of pages in which a lease holds blocks."""
        return len(set(self._pages_of(lease)))

    # -- leases ---------------------------------------------------------------------------------------

    def acquire(self, match: Match) -> BlockLease:
        """Hold the blocks of a hit."""
        tables: list[list[int]] = []
        for per_page, hit in zip(self._blocks_per_page, match.entries, strict=True):
            for block in hit.blocks:
                self.pool.share(block // per_page)
            tables.append([ABSENT] * hit.start + list(hit.blocks))
        spare: list[list[int]] = [[] for _ in tables]
        return BlockLease(tables, spare, match.num_tokens, match.num_tokens)

    def extend(self, lease: BlockLease, start: int, end: int) -> tuple[TableEntries, ...] | None:
        """Make room for the tokens `[start, end)`, and release blocks that no query from `start` on reads.

        Returns the new table entries per group, or None, without taking a page, if too few are available.
        """
        lease.check()
        for group, spec in enumerate(self.groups):
            first = spec.first_needed(start) // self.block_size
            if first:
                self._drop_before(group, lease, first)
        num_blocks = -(-end // self.block_size)
        num_missing = max(0, num_blocks - len(lease.tables[0]))  # all tables have the same length
        num_pages = (
            [num_missing] * self.num_groups
            if self._is_page_a_block
            else self._num_missing(lease, num_missing)
        )
        taken = self.pool.take(sum(num_pages))
        if taken is None:
            return None
        entries: list[TableEntries] = []
        for group, table in enumerate(lease.tables):
            pages = [taken.pop() for _ in range(num_pages[group])]
            fresh = tuple(pages)
            if not self._is_one_to_one:
                fresh = self._blocks_of(group, pages, lease.spare[group], num_missing)
            entries.append(TableEntries(len(table), fresh))
            table.extend(fresh)
        lease.capacity = num_blocks * self.block_size
        return tuple(entries)

    def _blocks_of(
        self, group: int, pages: list[int], spare: list[int], num: int
    ) -> tuple[int, ...]:
        """Return the next `num` blocks of a group: spare blocks first, then blocks of new pages."""
        per_page = self._blocks_per_page[group]
        blocks = []
        for _ in range(num):
            if not spare:
                page = pages.pop()
                self._group_of_page[page] = group
                if per_page > 1:
                    self.pool.share(page, per_page - 1)
                spare += range((page + 1) * per_page - 1, page * per_page - 1, -1)
            blocks.append(spare.pop())
        return tuple(blocks)

    def cache_full_blocks(
        self, lease: BlockLease, chain: HashChain, num_computed: int, tokens: I32
    ) -> None:
        """Put the full blocks of the first `num_computed` tokens, as far as `chain` covers them, into the index.

        `tokens` are those that the chain covers; they are read for events only.
        """
        size, index = self.block_size, self.index
        end = min(num_computed, chain.num_tokens) // size * size
        for length in range(lease.num_hashed_tokens + size, end + 1, size):
            for i, table in enumerate(lease.tables):
                block = table[length // size - 1]
                if block == ABSENT or not index.add(i, chain.at(length), block):
                    continue
                self.pool.mark_hashed(block // self._blocks_per_page[i])
                if index.events is not None and i == index.events.group:
                    index.events.stored(chain, length, tokens)
        lease.num_hashed_tokens = max(lease.num_hashed_tokens, end)

    def release(self, lease: BlockLease) -> None:
        """Release the blocks of a lease."""
        lease.check()
        self.pool.release(self._pages_of(lease))
        lease.spend()

    def end(self, lease: BlockLease) -> None:
        """Release the blocks of a lease, now if they are few, else in `release_ended`.

        Sequences that share a long prompt may end in the same step. Their pages are held until then.
        """
        if lease.num_entries <= MAX_ENTRIES_AT_ONCE:
            self.release(lease)
        else:
            self._unreleased.append(lease.take())

    @property
    def num_unreleased(self) -> int:
        """Leases that `release_ended` has to release."""
        return len(self._unreleased)

    def release_ended(self, max_blocks: int, min_available: int) -> None:
        """Release leases with `max_blocks` blocks, and more while fewer than `min_available` pages are available."""
        num_blocks = 0
        while self._unreleased and (
            num_blocks < max_blocks or self.pool.num_available < min_available
        ):
            lease = self._unreleased.popleft()
            num_blocks += lease.num_entries
            self.release(lease)

    def _pages_of(self, lease: BlockLease) -> list[int]:
        """Return the page of each block of a lease, those of its last tokens first.

        Pages are evicted in the order of their release, so every group keeps the start of a prompt longest.
        """
        if self._is_one_to_one:
            return [block for block in reversed(lease.tables[0]) if block != ABSENT]
        per_page = self._blocks_per_page
        spare = zip(per_page, lease.spare, strict=True)
        pages = [block // each for each, blocks in spare for block in blocks]
        # All tables have the same length: a row is the blocks of the same tokens.
        for row in zip(*map(reversed, lease.tables), strict=True):
            blocks = zip(per_page, row, strict=True)
            pages += [block // each for each, block in blocks if block != ABSENT]
        return pages

    def reset_prefix_cache(self) -> None:
        """Empty the prefix index. Leases keep their blocks."""
        self._discard(list(self.index))

    # -- steps ----------------------------------------------------------------------------------------

    def begin(self, step_id: int) -> None:
        """Start planning a step. `withdraw` attributes the blocks hashed from now on to it."""
        self.index.begin(step_id)

    def launch(self, step_id: int) -> None:
        """Record the launch of a step. Blocks released from now on are pending until it has finished."""
        self.pool.launch(step_id)

    def retire(self, step_id: int) -> None:
        """Record that all steps up to `step_id` have finished."""
        self.pool.retire(step_id)
        self.index.retire(step_id)

    def withdraw(self, step_id: int) -> None:
        """Remove the blocks that a failed step and later steps should have filled from the index."""
        self._discard(self.index.take_unfilled(step_id))

    # -- the index ------------------------------------------------------------------------------------

    def _resumable(self, groups: Sequence[int], chain: HashChain, length: int) -> int:
        """Return `length` if the groups can resume there, else the start of the first missing block."""
        for group in groups:
            index = self.index.blocks(group)
            for end in self._needed_ends(group, length):
                if chain.at(end) not in index:
                    return end - self.block_size
        return length

    def _hit_entries(self, group: int, chain: HashChain, length: int) -> TableEntries:
        index = self.index.blocks(group)
        ends = self._needed_ends(group, length)
        return TableEntries(
            ends.start // self.block_size - 1, tuple(index[chain.at(end)] for end in ends)
        )

    def _needed_ends(self, group: int, length: int) -> range:
        """Return the ends, in tokens, of the blocks that a group needs to resume at `length`."""
        size = self.block_size
        first = self.groups[group].first_needed(length) // size * size
        return range(first + size, length + 1, size)

    def _discard(self, blocks: Iterable[IndexedBlock]) -> None:
        """Remove blocks from the index. Their pages may be in any state."""
        for group, block in blocks:
            if self.index.remove(group, block):
                self.pool.unmark_hashed(block // self._blocks_per_page[group])

    def _evict(self, page: int) -> None:
        """Remove the blocks of a page from the index."""
        group = self._group_of_page[page]
        per_page = self._blocks_per_page[group]
        for block in range(page * per_page, (page + 1) * per_page):
            self.index.remove(group, block)

    def _drop_before(self, group: int, lease: BlockLease, first: int) -> None:
        """Release the blocks of a group's entries before `first`."""
        table, per_page = lease.tables[group], self._blocks_per_page[group]
        dropped = []
        for index in range(min(first, len(table)) - 1, -1, -1):
            if table[index] == ABSENT:
                break
            dropped.append(table[index] // per_page)
            table[index] = ABSENT
        self.pool.release(dropped)
