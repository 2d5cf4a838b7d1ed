"""Finds prefix hits, grows block tables, and puts full blocks into the prefix index.

The manager does not decide which sequence runs. `match` and `num_blocks_needed` answer questions and change nothing;
`acquire` and `extend` take blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tokenspeed_core.api.cache_groups import CacheGroupSpec
from tokenspeed_core.api.step import I32
from tokenspeed_core.kv_cache.events import KVEventLog
from tokenspeed_core.kv_cache.hashing import HashChain
from tokenspeed_core.kv_cache.lease import ABSENT, BlockLease
from tokenspeed_core.kv_cache.pool import BlockCounts, BlockPool

_NEVER_FULL = 2**31 - 1  # tokens per hash when prefix caching is off: no block is ever hashed


@dataclass(frozen=True, slots=True)
class TableEntries:
    """Consecutive entries of one group's block table: `table[start + i] = blocks[i]`."""

    start: int
    blocks: tuple[int, ...]


_NO_ENTRIES = TableEntries(0, ())


@dataclass(frozen=True, slots=True)
class Match:
    """A prefix hit.

    `num_tokens` is the length at which every group can resume, `entries` are the blocks per group that hold it, and
    `num_idle` is how many of those are available blocks now.
    """

    num_tokens: int
    entries: tuple[TableEntries, ...]
    num_idle: int


@dataclass(frozen=True, slots=True)
class _IndexKey:
    """Where the prefix index lists a block."""

    group: int
    digest: bytes


class KVManager:
    """The cache groups of a model over one pool of blocks; every block can hold a block of any group."""

    def __init__(
        self,
        groups: Sequence[CacheGroupSpec],
        block_size: int,
        num_blocks: int,
        *,
        prefix_caching: bool = True,
    ) -> None:
        """Start empty. `block_size` is in tokens and the same for all groups."""
        self.groups = tuple(groups)
        self.num_groups = len(self.groups)
        self.block_size = block_size
        self.granularity = block_size if prefix_caching else _NEVER_FULL
        self.pool = BlockPool(num_blocks, self._remove)
        self._index: list[dict[bytes, int]] = [{} for _ in groups]
        self._keys: dict[int, _IndexKey] = {}  # of the blocks in the index
        self._hashed_by_step: dict[int, list[int]] = {}
        self._planned_step = 0
        self.events: KVEventLog | None = None  # None: not collected

    def collect_events(self) -> KVEventLog:
        """Collect changes of the prefix index from now on."""
        whole = (i for i, group in enumerate(self.groups) if not group.first_needed(2**30))
        self.events = KVEventLog(next(whole, 0), self.block_size)
        return self.events

    def counts(self) -> BlockCounts:
        """Return the number of the pool's blocks in each state."""
        return self.pool.counts()

    def chain(self, salt: str, adapter_id: int) -> HashChain:
        """Return an empty hash chain."""
        return HashChain(self.granularity, salt, adapter_id)

    # -- queries --------------------------------------------------------------------------------------

    @property
    def has_prefix_cache(self) -> bool:
        """Whether prefix caching is on."""
        return self.granularity == self.block_size

    @property
    def max_sequence_len(self) -> int:
        """Tokens of the longest sequence that fits into the whole pool."""
        return self.pool.num_blocks // self.num_groups * self.block_size

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
        num_idle = sum(self.pool.is_idle(block) for hit in entries for block in hit.blocks)
        return Match(length, entries, num_idle)

    def no_match(self) -> Match:
        """Return a match of no tokens."""
        return Match(0, (_NO_ENTRIES,) * self.num_groups, 0)

    def num_blocks_needed(self, start: int, end: int) -> int:
        """Return the blocks that a sequence resuming at token `start` needs for its tokens up to `end`."""
        size = self.block_size
        total = 0
        for group in self.groups:
            first = max(start, group.first_needed(start) // size * size)
            if end > first:
                total += -(-end // size) - first // size
        return total

    # -- leases ---------------------------------------------------------------------------------------

    def acquire(self, match: Match) -> BlockLease:
        """Hold the blocks of a hit."""
        tables: list[list[int]] = []
        for hit in match.entries:
            for block in hit.blocks:
                self.pool.share(block)
            tables.append([ABSENT] * hit.start + list(hit.blocks))
        return BlockLease(tables, capacity=match.num_tokens, num_hashed_tokens=match.num_tokens)

    def extend(self, lease: BlockLease, start: int, end: int) -> tuple[TableEntries, ...] | None:
        """Make room for the tokens `[start, end)`, and release blocks that no query from `start` on reads.

        Returns the new table entries per group, or None, without taking a block, if too few are available.
        """
        lease.check()
        for group, table in zip(self.groups, lease.tables, strict=True):
            self._drop_before(table, group.first_needed(start) // self.block_size)
        num_blocks = -(-end // self.block_size)
        num_missing = [max(0, num_blocks - len(table)) for table in lease.tables]
        taken = self.pool.take(sum(num_missing))
        if taken is None:
            return None
        entries: list[TableEntries] = []
        for table, num in zip(lease.tables, num_missing, strict=True):
            fresh = tuple(taken.pop() for _ in range(num))
            entries.append(TableEntries(len(table), fresh))
            table.extend(fresh)
        lease.capacity = num_blocks * self.block_size
        return tuple(entries)

    def cache_full_blocks(
        self, lease: BlockLease, chain: HashChain, num_computed: int, tokens: I32
    ) -> None:
        """Put the full blocks of the first `num_computed` tokens, as far as `chain` covers them, into the index.

        `tokens` are those that the chain covers; they are read for events only.
        """
        size = self.block_size
        end = min(num_computed, chain.num_tokens) // size * size
        for length in range(lease.num_hashed_tokens + size, end + 1, size):
            for i, table in enumerate(lease.tables):
                block = table[length // size - 1]
                if block == ABSENT or not self._insert(_IndexKey(i, chain.at(length)), block):
                    continue
                if self.events is not None and i == self.events.group:
                    self.events.stored(chain, length, tokens)
        lease.num_hashed_tokens = max(lease.num_hashed_tokens, end)

    def release(self, lease: BlockLease) -> None:
        """Release the blocks of a lease."""
        self.pool.release(lease.take())

    def reset_prefix_cache(self) -> None:
        """Empty the prefix index. Leases keep their blocks."""
        self._discard(list(self._keys))

    # -- steps ----------------------------------------------------------------------------------------

    def begin(self, step_id: int) -> None:
        """Start planning a step. `withdraw` attributes the blocks hashed from now on to it."""
        self._planned_step = step_id

    def launch(self, step_id: int) -> None:
        """Record the launch of a step. Blocks released from now on are pending until it has finished."""
        self.pool.launch(step_id)

    def retire(self, step_id: int) -> None:
        """Record that all steps up to `step_id` have finished."""
        self.pool.retire(step_id)
        for step in [step for step in self._hashed_by_step if step <= step_id]:
            del self._hashed_by_step[step]

    def withdraw(self, step_id: int) -> None:
        """Remove from the index the blocks that a failed step and later ones should have filled."""
        for step in [step for step in self._hashed_by_step if step >= step_id]:
            self._discard(self._hashed_by_step.pop(step))

    # -- the index ------------------------------------------------------------------------------------

    def _resumable(self, groups: Sequence[int], chain: HashChain, length: int) -> int:
        """Return `length` if the groups can resume there, else the start of the first missing block."""
        for group in groups:
            index = self._index[group]
            for end in self._needed_ends(group, length):
                if chain.at(end) not in index:
                    return end - self.block_size
        return length

    def _hit_entries(self, group: int, chain: HashChain, length: int) -> TableEntries:
        index = self._index[group]
        ends = self._needed_ends(group, length)
        return TableEntries(
            ends.start // self.block_size - 1, tuple(index[chain.at(end)] for end in ends)
        )

    def _needed_ends(self, group: int, length: int) -> range:
        """Return the ends, in tokens, of the blocks that a group needs to resume at `length`."""
        size = self.block_size
        first = self.groups[group].first_needed(length) // size * size
        return range(first + size, length + 1, size)

    def _insert(self, key: _IndexKey, block: int) -> bool:
        """Add a block to the index. Returns False if the index has another block with this content."""
        index = self._index[key.group]
        if key.digest in index:
            return False
        index[key.digest] = block
        self._keys[block] = key
        self._hashed_by_step.setdefault(self._planned_step, []).append(block)
        self.pool.mark_hashed(block)
        return True

    def _discard(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if block in self._keys:
                self._remove(block)
                self.pool.unmark_hashed(block)

    def _remove(self, block: int) -> None:
        key = self._keys.pop(block)
        del self._index[key.group][key.digest]
        if self.events is not None and key.group == self.events.group:
            self.events.removed(key.digest)

    def _drop_before(self, table: list[int], first: int) -> None:
        """Release the blocks of the entries before `first`."""
        dropped = []
        for index in range(min(first, len(table)) - 1, -1, -1):
            if table[index] == ABSENT:
                break
            dropped.append(table[index])
            table[index] = ABSENT
        self.pool.release(dropped)
