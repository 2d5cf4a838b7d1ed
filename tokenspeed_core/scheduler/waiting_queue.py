"""The queue of sequences that wait for a slot: tenants take turns, and the policy orders the sequences of a tenant."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from tokenspeed_core.api.policy import Policy, QueuedSequence
from tokenspeed_core.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True, order=True)
class QueueEntry:
    """A waiting sequence, its sort key and its tenant."""

    key: tuple[int, int]
    sequence_id: int
    tenant: str = field(default="", compare=False)


@dataclass(slots=True)
class _TenantQueue:
    """The waiting sequences of a tenant, as a heap, and the number of turns that it had."""

    heap: list[QueueEntry]
    num_turns: int


class WaitingQueue:
    """A heap of entries for each tenant. Entries of sequences that ended stay until they are popped.

    The first part of a policy's key is a rank. Among the tenants whose first entry has the lowest rank,
    the one with the fewest running sequences, then the fewest admissions, is next, so a tenant with many
    requests does not delay the others. With one tenant, the order is the policy's.
    """

    def __init__(
        self, policy: Policy, num_running_of: Callable[[str], int] = lambda tenant: 0
    ) -> None:
        """`num_running_of` returns the number of running sequences of a tenant."""
        self._policy = policy
        self._num_running_of = num_running_of
        self._queues: dict[str, _TenantQueue] = {}

    def key_of(self, sequence: Sequence) -> tuple[int, int]:
        """Return the policy's key of a sequence; the smallest is first."""
        request = sequence.request
        queued = QueuedSequence(
            priority=request.priority,
            arrival=sequence.arrival,
            num_tokens=len(sequence.tokens),
            max_tokens=request.max_tokens,
            tenant=request.tenant,
        )
        return self._policy.key(queued)

    def push(self, sequence: Sequence) -> None:
        """Add a sequence, in the policy's order."""
        key = self.key_of(sequence)
        self.put_back(QueueEntry(key, sequence.sequence_id, sequence.request.tenant))

    def put_back(self, entry: QueueEntry) -> None:
        """Add an entry that `pop` returned."""
        queue = self._queues.get(entry.tenant)
        if queue is None:
            # A new tenant gets no turns for the time before it came.
            num_turns = min((each.num_turns for each in self._queues.values()), default=0)
            queue = self._queues[entry.tenant] = _TenantQueue([], num_turns)
        heapq.heappush(queue.heap, entry)

    def first(self) -> QueueEntry | None:
        """Return the first entry without removing it; None if the queue is empty."""
        queue = self._next()
        return None if queue is None else queue.heap[0]

    def pop(self, *, is_turn: bool = False) -> QueueEntry:
        """Remove and return the first entry. `is_turn`: count it as an admission of its tenant."""
        queue = self._next()
        assert queue is not None, "the queue is not empty"
        entry = heapq.heappop(queue.heap)
        queue.num_turns += is_turn
        if not queue.heap:
            del self._queues[entry.tenant]
        return entry

    def _next(self) -> _TenantQueue | None:
        queues = self._queues.values()
        if len(queues) < 2:
            return next(iter(queues), None)
        return min(queues, key=self._order)

    def _order(self, queue: _TenantQueue) -> tuple[int, int, int, tuple[int, int]]:
        first = queue.heap[0]
        return first.key[0], self._num_running_of(first.tenant), queue.num_turns, first.key
