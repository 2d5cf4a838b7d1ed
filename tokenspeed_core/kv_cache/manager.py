"""Blocks for sequences: what a prefix hit is, how tables grow, and what becomes shareable when.

The manager decides nothing about who runs. Asking (`match`, `blocks_needed`) and taking (`acquire`,
`extend`) are separate calls, and only the latter change anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenspeed_core.api.cache_groups import CacheGroupSpec
from tokenspeed_core.kv_cache.hashing import HashChain
from tokenspeed_core.kv_cache.lease import ABSENT, BlockLease
from tokenspeed_core.kv_cache.pool import BlockCounts, BlockPool

Entries = tuple[tuple[tuple[int, int], ...], ...]
"""Entries of block tables: (index, block) pairs, for each group."""


@dataclass(frozen=True, slots=True)
class Match:
    """A prefix hit: `num_tokens` at which every group can resume, and the blocks that hold it.

    `num_idle` counts the blocks that nobody holds now, which using the hit takes out of the pool's available ones.
    """

    num_tokens: int
    blocks: Entries
    num_idle: int


@dataclass(frozen=True, slots=True)
class _Copy:
    """A block copy in a group; `kept` is held until the plan that carries it is launched, then named `digest`."""

    group: int
    src: int
    dst: int
    kept: int
    digest: bytes | None


class KVManager:
    """All cache groups of a model over one pool of blocks; a block of any group fills one block."""

    def __init__(
        self,
        groups: Sequence[CacheGroupSpec],
        block_size: int,
        num_blocks: int,
        *,
        prefix_caching: bool = True,
    ) -> None:
        """Start empty. `block_size` is in tokens, the same for all groups."""
        self.groups = tuple(groups)
        self.block_size = block_size
        self.has_recurrent = any(group.is_recurrent for group in groups)
        self.num_token_groups = sum(not group.is_recurrent for group in groups)
        self.pool = BlockPool(num_blocks, self._forget)
        # The tokens that a hash covers: without prefix caching more than any sequence has, and nothing gets a name.
        self.granularity = block_size if prefix_caching else 2**31 - 1
        self._index: list[dict[bytes, int]] = [{} for _ in groups]
        self._names: dict[int, tuple[int, bytes]] = {}
        self._now: list[_Copy] = []  # copies that the plan being built carries
        self._next: list[_Copy] = []  # copies of states that stand only when that step is over
        self._named_by_step: dict[int, list[int]] = {}
        self._planning = 0

    def counts(self) -> BlockCounts:
        """Return the pool's blocks by state."""
        return self.pool.counts()

    def chain(self, salt: str, adapter_id: int) -> HashChain:
        """Return an empty hash chain of the manager's granularity."""
        return HashChain(self.granularity, salt, adapter_id)

    # -- asking ---------------------------------------------------------------------------------------

    def match(self, chain: HashChain, num_tokens: int) -> Match:
        """Find the longest prefix shorter than `num_tokens` at which every group can resume. Changes nothing."""
        size = self.block_size
        limit = min(chain.num_tokens, (num_tokens - 1) // size * size)
        if limit <= 0:
            return self.no_match()
        partial: list[int] = []  # groups that need only some of the past
        for i, group in enumerate(self.groups):
            if not group.is_recurrent and group.first_needed(limit) == 0:
                limit = self._reach((i,), chain, limit)
            else:
                partial.append(i)
        while limit > 0 and (reach := self._reach(partial, chain, limit)) < limit:
            limit = reach  # every length between the two needs the block that is missing
        if limit <= 0:
            return self.no_match()
        blocks = tuple(self._resume_blocks(i, chain, limit) for i in range(len(self.groups)))
        idle = sum(self.pool.is_idle(block) for group_blocks in blocks for _, block in group_blocks)
        return Match(limit, blocks, idle)

    def no_match(self) -> Match:
        """Return the hit of nothing, for a sequence that is to be computed from its start."""
        return Match(0, tuple(() for _ in self.groups), 0)

    def blocks_needed(self, start: int, end: int) -> int:
        """Return the blocks that a sequence resuming at `start` takes to hold the tokens up to `end`."""
        size = self.block_size
        total = 0
        for group in self.groups:
            if group.is_recurrent:
                total += 1
            else:
                first = max(start, group.first_needed(start) // size * size)
                total += -(-end // size) - first // size if end > first else 0
        return total

    def max_tokens_in_pool(self) -> int:
        """Return the longest sequence that could have the whole pool to itself."""
        blocks = self.pool.num_blocks - sum(group.is_recurrent for group in self.groups)
        return (
            blocks // self.num_token_groups * self.block_size
            if self.num_token_groups
            else 2**31 - 1
        )

    # -- taking ---------------------------------------------------------------------------------------

    def acquire(self, match: Match) -> BlockLease | None:
        """Hold a hit's blocks, and a working state per recurrent group. None (and no change) without room."""
        num_working = sum(group.is_recurrent for group in self.groups)
        if num_working + match.num_idle > self.pool.num_available:
            return None
        # The hit first: taking blocks may evict, and must not evict what the hit consists of.
        for group_blocks in match.blocks:
            for _, block in group_blocks:
                self.pool.share(block)
        working = self.pool.take(num_working)
        assert working is not None, "blocks counted as available were not"
        tables: list[list[int]] = []
        for i, group in enumerate(self.groups):
            if group.is_recurrent:
                block = working.pop()
                tables.append([block])
                # A checkpoint is held only until the copy of it is on its way.
                self._now += [
                    _Copy(i, source, block, source, digest=None) for _, source in match.blocks[i]
                ]
                continue
            table = [ABSENT] * (match.num_tokens // self.block_size)
            for index, block in match.blocks[i]:
                table[index] = block
            tables.append(table)
        return BlockLease(tables, capacity=match.num_tokens, num_named=match.num_tokens)

    def extend(self, lease: BlockLease, start: int, end: int) -> Entries | None:
        """Make room for the tokens `[start, end)`, dropping what no query from `start` on reads.

        Returns the new table entries; None, with no block taken, when there are too few.
        """
        lease.check()
        for group, table in zip(self.groups, lease.tables, strict=True):
            if not group.is_recurrent:
                self._drop_before(table, group.first_needed(start) // self.block_size)
        blocks = -(-end // self.block_size)
        missing = [
            0 if group.is_recurrent else max(0, blocks - len(table))
            for group, table in zip(self.groups, lease.tables, strict=True)
        ]
        taken = self.pool.take(sum(missing))
        if taken is None:
            return None
        entries: list[tuple[tuple[int, int], ...]] = []
        for table, num in zip(lease.tables, missing, strict=True):
            first = len(table)
            fresh = [taken.pop() for _ in range(num)]
            table.extend(fresh)
            entries.append(tuple(enumerate(fresh, first)))
        lease.capacity = blocks * self.block_size
        return tuple(entries)

    def cache_full_blocks(
        self, lease: BlockLease, chain: HashChain, num_computed: int, *, is_exact: bool
    ) -> None:
        """Make the blocks whose tokens are all planned and known shareable.

        `is_exact` says that a recurrent state stands at `num_computed` when the step being planned is over,
        so that a checkpoint can be copied from it by the plan after.
        """
        size = self.block_size
        end = min(num_computed, chain.num_tokens) // size * size
        for i, group in enumerate(self.groups):
            if group.is_recurrent:
                if is_exact and end == num_computed and end > 0:
                    self._checkpoint(i, lease.tables[i][0], chain.at(end))
                continue
            for length in range(lease.num_named + size, end + 1, size):
                block = lease.tables[i][length // size - 1]
                if block != ABSENT:
                    self._name(i, block, chain.at(length))
        lease.num_named = max(lease.num_named, end)

    def release(self, lease: BlockLease) -> None:
        """Give a lease's blocks back; they are reusable when nothing in flight can touch them."""
        self.pool.release(lease.take())

    def reset(self) -> None:
        """Forget the content of every block. What leases hold stays theirs, but is no longer shareable."""
        for block in list(self._names):
            self._unname(block)
        waiting, self._next = self._now + self._next, []
        self._now = [copy for copy in waiting if copy.digest is None]
        self.pool.release([copy.kept for copy in waiting if copy.digest is not None])

    # -- steps ----------------------------------------------------------------------------------------

    def begin(self, step_id: int) -> None:
        """Start planning a step."""
        self._planning = step_id
        self._now, self._next = self._now + self._next, []

    def copies(self) -> list[tuple[list[int], list[int]]]:
        """Return the (src, dst) block copies per group that the step being planned must carry."""
        return [
            ([c.src for c in self._now if c.group == i], [c.dst for c in self._now if c.group == i])
            for i in range(len(self.groups))
        ]

    def launch(self, step_id: int) -> None:
        """Note that the planned step is on its way: what is released from now on is pending by it."""
        self.pool.launch(step_id)
        for copy in self._now:
            if copy.digest is not None:
                self._name(copy.group, copy.kept, copy.digest)
            self.pool.release([copy.kept])
        self._now = []

    def drop_copies(self) -> bool:
        """Drop the copies that no step has carried yet. Return whether there were any."""
        kept = [copy.kept for copy in self._now + self._next]
        self.pool.release(kept)
        self._now, self._next = [], []
        return bool(kept)

    def retire(self, step_id: int) -> None:
        """Note that all steps up to this one are over."""
        self.pool.retire(step_id)
        for done in [step for step in self._named_by_step if step <= step_id]:
            del self._named_by_step[done]

    def withdraw(self, step_id: int) -> None:
        """Forget the blocks that a failed step and those after it would have filled."""
        for step in [step for step in self._named_by_step if step >= step_id]:
            for block in self._named_by_step.pop(step):
                if block in self._names:
                    self._unname(block)
        self.drop_copies()

    # -- the index ------------------------------------------------------------------------------------

    def _reach(self, groups: Sequence[int], chain: HashChain, length: int) -> int:
        """Return where the first block begins that a group lacks to resume at `length`; `length`: all can resume."""
        for group in groups:
            index = self._index[group]
            for end in self._resume_lengths(group, length):
                if chain.at(end) not in index:
                    return end - self.block_size
        return length

    def _resume_blocks(
        self, group: int, chain: HashChain, length: int
    ) -> tuple[tuple[int, int], ...]:
        index = self._index[group]
        return tuple(
            (n // self.block_size - 1, index[chain.at(n)])
            for n in self._resume_lengths(group, length)
        )

    def _resume_lengths(self, group: int, length: int) -> range:
        """Return the lengths whose blocks the group needs, to resume at `length`."""
        size, spec = self.block_size, self.groups[group]
        if spec.is_recurrent:
            return range(length, length + 1)
        return range(spec.first_needed(length) // size * size + size, length + 1, size)

    def _name(self, group: int, block: int, digest: bytes) -> None:
        if digest in self._index[group]:
            return
        self._index[group][digest] = block
        self._names[block] = (group, digest)
        self._named_by_step.setdefault(self._planning, []).append(block)
        self.pool.name(block)

    def _unname(self, block: int) -> None:
        self._forget(block)
        self.pool.unname(block)

    def _forget(self, block: int) -> None:
        group, digest = self._names.pop(block)
        del self._index[group][digest]

    def _checkpoint(self, group: int, working: int, digest: bytes) -> None:
        if digest in self._index[group]:
            return
        blocks = self.pool.take(1)
        if blocks is not None:
            self._next.append(_Copy(group, working, blocks[0], kept=blocks[0], digest=digest))

    def _drop_before(self, table: list[int], first: int) -> None:
        dropped = []
        for index in range(min(first, len(table)) - 1, -1, -1):
            if table[index] == ABSENT:
                break
            dropped.append(table[index])
            table[index] = ABSENT
        self.pool.release(dropped)
