"""Who is here: every live sequence in its one typed state, the slots, and the queue of those that wait."""

from __future__ import annotations

import heapq

from tokenspeed_core.api.policy import Policy
from tokenspeed_core.api.sampling import FinishReason
from tokenspeed_core.kv_cache.lease import BlockLease
from tokenspeed_core.kv_cache.manager import KVManager
from tokenspeed_core.scheduler.columns import SlotColumns
from tokenspeed_core.scheduler.lifecycle import (
    Admit,
    AwaitingInput,
    Decoding,
    End,
    Event,
    Finished,
    InputReady,
    Lease,
    Preempt,
    Preempted,
    Prefilling,
    State,
    Waiting,
    advance,
)
from tokenspeed_core.scheduler.sequence import Sequence

Entry = tuple[tuple[int, int], int]  # of the queue: (policy key, sequence id)


class SequenceTable:
    """Moves sequences between states, and keeps rows, slots and blocks in step with them.

    Nobody else assigns a state, hands out a slot or gives a lease back.
    """

    def __init__(self, columns: SlotColumns, kv: KVManager, policy: Policy) -> None:
        """Start empty; every slot of `columns` is free."""
        self.num_waiting = (
            0  # sequences without a slot that want one, now or when their input comes
        )
        self.num_preemptions = 0
        self._columns, self._kv, self._policy = columns, kv, policy
        self._states: dict[int, State] = {}
        self._queue: list[Entry] = []  # a heap
        self._slots = list(range(len(columns.sequence_id) - 1, -1, -1))
        self._stuck_at = -1  # blocks available when the first in the queue last found no room

    # -- asking ---------------------------------------------------------------------------------------

    def get(self, sequence_id: int) -> State | None:
        """Return a sequence's state; None when it is over or was never here."""
        return self._states.get(sequence_id)

    def at(self, slot: int) -> State:
        """Return the state of the sequence that holds a slot."""
        return self._states[int(self._columns.sequence_id[slot])]

    def lease(self, slot: int) -> BlockLease:
        """Return the blocks of the sequence that holds a slot."""
        state = self.at(slot)
        assert isinstance(state, Prefilling | Decoding), f"nobody holds slot {slot}"
        return state.lease.blocks

    @property
    def num_running(self) -> int:
        """Sequences that hold a slot."""
        return len(self._columns.sequence_id) - len(self._slots)

    @property
    def has_candidates(self) -> bool:
        """Whether the queue has entries (some may be of sequences that are over)."""
        return bool(self._queue)

    @property
    def can_admit(self) -> bool:
        """Whether there is a slot, somebody who wants it, and more room than when the first last found none."""
        if not self._slots or not self._queue:
            return False
        return not self.num_running or self._kv.pool.num_available > self._stuck_at

    # -- the queue ------------------------------------------------------------------------------------

    def add(self, sequence: Sequence, awaits: str | None) -> None:
        """Take in a sequence that waits for a slot, or first for input."""
        self.num_waiting += 1
        if awaits is not None:
            self._states[sequence.sequence_id] = AwaitingInput(sequence, awaits)
            return
        self._states[sequence.sequence_id] = Waiting(sequence)
        self._enqueue(sequence)

    def input_ready(self, state: AwaitingInput) -> None:
        """Let a sequence wait for a slot."""
        self.move(state, InputReady())
        self._enqueue(state.sequence)

    def first(self) -> Waiting | Preempted | None:
        """Return the sequence that comes next; entries of sequences that are over are dropped."""
        while self._queue:
            state = self._states.get(self._queue[0][1])
            if isinstance(state, Waiting | Preempted):
                return state
            heapq.heappop(self._queue)
        return None

    def pop(self) -> Entry:
        """Take the first entry off the queue."""
        return heapq.heappop(self._queue)

    def put_back(self, entry: Entry) -> None:
        """Put an entry back that `pop` took."""
        heapq.heappush(self._queue, entry)

    def stuck(self) -> None:
        """Note that the first found no room: it is not asked again before there is more."""
        self._stuck_at = self._kv.pool.num_available

    def _enqueue(self, sequence: Sequence) -> None:
        key = self._policy.key(sequence.request.priority, sequence.arrival)
        heapq.heappush(self._queue, (key, sequence.sequence_id))
        self._stuck_at = -1

    # -- states ---------------------------------------------------------------------------------------

    def admit(self, state: Waiting | Preempted, lease: BlockLease, num_hit: int) -> int:
        """Give a sequence a slot, with blocks that hold `num_hit` of its tokens already. Returns the slot."""
        slot = self._slots.pop()
        self._columns.occupy(slot, state.sequence, num_hit, lease.capacity)
        self._stuck_at = -1
        self.num_waiting -= 1
        self.move(state, Admit(Lease(slot, lease)))
        return slot

    def preempt(self, slot: int) -> None:
        """Take slot and blocks from a sequence; it waits for them again."""
        state = self.at(slot)
        self.num_preemptions += 1
        self.move(state, Preempt())
        self.num_waiting += 1
        self._enqueue(state.sequence)

    def end(self, state: State, reason: FinishReason, *, sends: bool = False) -> None:
        """End a sequence. With `sends` its blocks, if it has any, are kept for a transfer."""
        if isinstance(state, Decoding):
            self.name_known(state.lease.slot)
        if isinstance(state, Waiting | Preempted | AwaitingInput):
            self.num_waiting -= 1
        self.move(state, End(reason, sends and isinstance(state, Prefilling | Decoding)))

    def move(self, state: State, event: Event) -> None:
        """Apply an event to a sequence's state, and give back what the move frees."""
        move = advance(state, event)
        if move.slot is not None:
            self._columns.vacate(move.slot, move.state.sequence)
            self._slots.append(move.slot)
        if move.blocks is not None:
            self._kv.release(move.blocks)
        if isinstance(move.state, Finished):
            del self._states[move.state.sequence.sequence_id]
        else:
            self._states[move.state.sequence.sequence_id] = move.state

    def name_known(self, slot: int) -> None:
        """Make a decoding sequence's blocks that are computed and whose tokens are known shareable."""
        state = self.at(slot)
        if isinstance(state, Decoding):
            known = self._columns.known(slot)
            state.sequence.chain.extend(known)
            self._kv.cache_full_blocks(
                state.lease.blocks, state.sequence.chain, len(known) - 1, is_exact=False
            )
            self._columns.num_hashed_tokens[slot] = state.lease.blocks.num_named
