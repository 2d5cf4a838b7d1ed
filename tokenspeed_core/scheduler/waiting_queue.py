"""The queue of sequences that wait for a slot, in the policy's order."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from tokenspeed_core.api.policy import Policy
from tokenspeed_core.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True, order=True)
class QueueEntry:
    """A waiting sequence and its sort key."""

    key: tuple[int, int]
    sequence_id: int


class WaitingQueue:
    """A heap of entries. Entries of sequences that ended stay until they are popped."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._heap: list[QueueEntry] = []

    def push(self, sequence: Sequence) -> None:
        """Add a sequence, in the policy's order."""
        key = self._policy.key(sequence.request.priority, sequence.arrival)
        self.put_back(QueueEntry(key, sequence.sequence_id))

    def put_back(self, entry: QueueEntry) -> None:
        """Add an entry that `pop` returned."""
        heapq.heappush(self._heap, entry)

    def first(self) -> QueueEntry | None:
        """Return the first entry without removing it; None if the queue is empty."""
        return self._heap[0] if self._heap else None

    def pop(self) -> QueueEntry:
        """Remove and return the first entry."""
        return heapq.heappop(self._heap)
