"""The prefix index: maps digests to blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from tokenspeed_core.kv_cache.events import KVEventLog


class IndexedBlock(NamedTuple):
    """A block in the index, and its cache group."""

    group: int
    block: int


class PrefixIndex:
    """The blocks of each cache group by digest. Blocks are attributed to the step that is to fill them."""

    def __init__(self, num_groups: int) -> None:
        """Start empty."""
        self.events: KVEventLog | None = None  # None: not collected
        self._blocks: list[dict[bytes, int]] = [{} for _ in range(num_groups)]
        self._digests: list[dict[int, bytes]] = [{} for _ in range(num_groups)]
        self._by_step: dict[int, list[IndexedBlock]] = {}
        self._planned_step = 0

    def __iter__(self) -> Iterator[IndexedBlock]:
        """Yield all blocks."""
        for group, digests in enumerate(self._digests):
            yield from (IndexedBlock(group, block) for block in digests)

    def blocks(self, group: int) -> Mapping[bytes, int]:
        """Return the blocks of a group by digest."""
        return self._blocks[group]

    def add(self, group: int, digest: bytes, block: int) -> bool:
        """Add a block. Returns False if the index has another block with this content."""
        blocks = self._blocks[group]
        if digest in blocks:
            return False
        blocks[digest] = block
        self._digests[group][block] = digest
        self._by_step.setdefault(self._planned_step, []).append(IndexedBlock(group, block))
        return True

    def remove(self, group: int, block: int) -> bool:
        """Remove a block. Returns False if the index does not have it."""
        digest = self._digests[group].pop(block, None)
        if digest is None:
            return False
        del self._blocks[group][digest]
        if self.events is not None and group == self.events.group:
            self.events.removed(digest)
        return True

    def begin(self, step_id: int) -> None:
        """Attribute blocks that are added from now on to a step."""
        self._planned_step = step_id

    def retire(self, step_id: int) -> None:
        """Record that all steps up to `step_id` have filled their blocks."""
        for step in [step for step in self._by_step if step <= step_id]:
            del self._by_step[step]

    def take_unfilled(self, step_id: int) -> list[IndexedBlock]:
        """Return, once, the blocks that a failed step and later steps should have filled."""
        steps = [step for step in self._by_step if step >= step_id]
        return [block for step in steps for block in self._by_step.pop(step)]
