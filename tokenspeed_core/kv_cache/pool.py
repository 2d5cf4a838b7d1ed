"""Reference counts of the KV cache's blocks, and the order in which blocks are reused.

Every block is in one of four states, and the four counts always add up to the size of the pool:

* *held*: at least one lease uses the block.
* *cached*: no lease uses it, and the prefix index knows its content.
* *free*: no lease uses it, and its content is unknown.
* *pending*: it was released while a step that may access it was in flight.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Number of blocks in each state."""

    free: int
    cached: int
    held: int
    pending: int


@dataclass(frozen=True, slots=True)
class _Pending:
    """A released block and the last step that may access it."""

    step_id: int
    block: int


class BlockPool:
    """Hands out free blocks first, then the least recently released cached ones. O(1) per block.

    A block released while steps are in flight can be reused once the last of them is retired.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None]) -> None:
        """Start with all blocks free. `on_evict(block)` is called when a cached block is handed out."""
        self.num_blocks = num_blocks
        self.last_retired = 0  # id of the last step that finished
        self._last_launched = 0
        self._on_evict = on_evict
        self._refs = [0] * num_blocks
        self._released_at = [0] * num_blocks  # last step launched at the block's last release
        self._is_hashed = [False] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._pending: deque[_Pending] = deque()
        self._num_pending = 0

    def counts(self) -> BlockCounts:
        """Return the number of blocks in each state."""
        free, cached = len(self._free), len(self._cached)
        held = self.num_blocks - free - cached - self._num_pending
        return BlockCounts(free, cached, held, self._num_pending)

    @property
    def num_available(self) -> int:
        """Blocks that `take` can hand out now."""
        return len(self._free) + len(self._cached)

    def is_idle(self, block: int) -> bool:
        """Whether a hashed block is counted in `num_available`."""
        return block in self._cached

    def take(self, num: int) -> list[int] | None:
        """Hold `num` blocks. Returns None and changes nothing if fewer are available."""
        if num > self.num_available:
            return None
        blocks = []
        for _ in range(num):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._cached.popitem(last=False)
                self._is_hashed[block] = False
                self._on_evict(block)
            self._refs[block] = 1
            blocks.append(block)
        return blocks

    def share(self, block: int) -> None:
        """Add a reference to a block that is held, cached or pending."""
        if self._refs[block] == 0:
            if block in self._cached:
                del self._cached[block]
            else:
                self._num_pending -= 1
        self._refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference of each block."""
        for block in blocks:
            assert self._refs[block] > 0, f"block {block} released twice"
            self._refs[block] -= 1
            if self._refs[block]:
                continue
            self._num_pending += 1
            if self._last_launched <= self.last_retired:  # nothing is in flight
                self._make_available(block)
            elif self._released_at[block] != self._last_launched:
                self._released_at[block] = self._last_launched
                self._pending.append(_Pending(self._last_launched, block))

    def mark_hashed(self, block: int) -> None:
        """Mark a held block as indexed: when released, it becomes cached instead of free."""
        self._is_hashed[block] = True

    def unmark_hashed(self, block: int) -> None:
        """Mark a block as not indexed. The block may be in any state."""
        self._is_hashed[block] = False
        if block in self._cached:
            del self._cached[block]
            self._free.append(block)

    def launch(self, step_id: int) -> None:
        """Record the launch of a step."""
        self._last_launched = step_id

    def retire(self, step_id: int) -> None:
        """Record that all steps up to `step_id` have finished, and free the blocks that waited for them."""
        self.last_retired = step_id
        while self._pending and self._pending[0].step_id <= step_id:
            pending = self._pending.popleft()
            block = pending.block
            if self._refs[block] == 0 and self._released_at[block] == pending.step_id:
                self._released_at[block] = 0
                self._make_available(block)

    def _make_available(self, block: int) -> None:
        self._num_pending -= 1
        if self._is_hashed[block]:
            self._cached[block] = None
        else:
            self._free.append(block)
