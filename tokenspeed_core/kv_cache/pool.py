"""The arena's blocks: who holds them, which may be reused, and when.

Every block is in one of four states, and `free + cached + held + pending == all` always:
*held* by leases, *cached* (nobody's, but its content has a name), *free*, or *pending*: released while a
step or a transfer that may touch it is still in flight.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Blocks by state."""

    free: int
    cached: int
    held: int
    pending: int


class BlockPool:
    """Reference counts, fences and the order of eviction (least recently released first). All O(1) a block.

    Steps are pending by their ids: a block released while step `launched` may still run becomes reusable when
    `retire` names that step.
    """

    def __init__(self, num_blocks: int, forget: Callable[[int], None]) -> None:
        """Start with all blocks free. `forget(block)` is called when a cached block is evicted."""
        self._forget = forget
        self._refs = [0] * num_blocks
        self._stamps = [0] * num_blocks  # the step that pending the block last
        self._is_named = [False] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._fences: deque[tuple[int, int]] = deque()
        self._num_pending = 0
        self._launched = 0
        self.retired = 0  # the last step that is over
        self.num_blocks = num_blocks

    def counts(self) -> BlockCounts:
        """Return the number of blocks in each state. Changes nothing."""
        free, cached = len(self._free), len(self._cached)
        held = self.num_blocks - free - cached - self._num_pending
        return BlockCounts(free, cached, held, self._num_pending)

    @property
    def num_available(self) -> int:
        """Blocks that `take` could hand out now."""
        return len(self._free) + len(self._cached)

    def is_idle(self, block: int) -> bool:
        """Say whether a block counts in `num_available`."""
        return block in self._cached

    def take(self, num: int) -> list[int] | None:
        """Hold `num` blocks, free ones first, then the longest unused; None (and no change) if there are fewer."""
        if num > self.num_available:
            return None
        blocks = []
        for _ in range(num):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._cached.popitem(last=False)
                self._is_named[block] = False
                self._forget(block)
            self._refs[block] = 1
            blocks.append(block)
        return blocks

    def share(self, block: int) -> None:
        """Hold a block that is held, cached or pending once more."""
        if self._refs[block] == 0:
            if block in self._cached:
                del self._cached[block]
            else:
                self._num_pending -= 1
        self._refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one hold of each block; the last one dropped makes it reusable once nothing in flight can touch it."""
        for block in blocks:
            assert self._refs[block] > 0, f"block {block} released twice"
            self._refs[block] -= 1
            if self._refs[block]:
                continue
            self._num_pending += 1
            if self._launched <= self.retired:  # nothing is in flight
                self._land(block)
            elif self._stamps[block] != self._launched:
                self._stamps[block] = self._launched
                self._fences.append((self._launched, block))

    def name(self, block: int) -> None:
        """Mark a held block's content as known: when released it is cached, not free."""
        self._is_named[block] = True

    def unname(self, block: int) -> None:
        """Take the name off a block, in whatever state it is."""
        self._is_named[block] = False
        if block in self._cached:
            del self._cached[block]
            self._free.append(block)

    def launch(self, step_id: int) -> None:
        """Note that a step is on its way: blocks released from now on are pending by it."""
        self._launched = step_id

    def retire(self, step_id: int) -> None:
        """Note that all steps up to this one are over; their pending blocks become cached or free."""
        self.retired = step_id
        while self._fences and self._fences[0][0] <= step_id:
            stamp, block = self._fences.popleft()
            if self._refs[block] == 0 and self._stamps[block] == stamp:
                self._stamps[block] = 0
                self._land(block)

    def _land(self, block: int) -> None:
        self._num_pending -= 1
        if self._is_named[block]:
            self._cached[block] = None
        else:
            self._free.append(block)
