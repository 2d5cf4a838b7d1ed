"""The live sequences, each in one typed state, and the slots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np

from tokenspeed_core.api.sampling import FinishReason
from tokenspeed_core.kv_cache.lease import BlockLease
from tokenspeed_core.kv_cache.manager import KVManager
from tokenspeed_core.scheduler.columns import VACANT, SlotColumns
from tokenspeed_core.scheduler.lifecycle import (
    Admit,
    Decoding,
    End,
    Event,
    Finished,
    Lease,
    Preempt,
    Preempted,
    Prefilling,
    PrefillPlanned,
    State,
    Waiting,
    advance,
)
from tokenspeed_core.scheduler.sequence import Sequence


class SequenceTable:
    """Assigns states and slots, releases blocks, and keeps the columns consistent with the states."""

    def __init__(self, columns: SlotColumns, kv: KVManager) -> None:
        """Start without sequences. Every slot of `columns` must be vacant."""
        self._columns = columns
        self._kv = kv
        self._states: dict[int, State] = {}
        self._free_slots = list(range(len(columns.sequence_id) - 1, -1, -1))
        self._num_of_tenant: Counter[str] = Counter()
        self._num_running_of: Counter[str] = Counter()
        self.num_waiting_tokens = 0  # prompt tokens of the sequences without a slot
        # Called with a slot before its sequence loses it.
        self.on_release: Callable[[int], None] | None = None

    def __len__(self) -> int:
        """Return the number of live sequences."""
        return len(self._states)

    @property
    def num_running(self) -> int:
        """Sequences with a slot."""
        return len(self._columns.sequence_id) - len(self._free_slots)

    @property
    def num_waiting(self) -> int:
        """Sequences without a slot."""
        return len(self._states) - self.num_running

    @property
    def has_free_slot(self) -> bool:
        """Whether a sequence can be admitted."""
        return bool(self._free_slots)

    def num_of_tenant(self, tenant: str) -> int:
        """Live sequences of a tenant."""
        return self._num_of_tenant[tenant]

    @property
    def num_tenants(self) -> int:
        """Tenants with live sequences."""
        return len(self._num_of_tenant)

    def num_running_of(self, tenant: str) -> int:
        """Sequences of a tenant with a slot."""
        return self._num_running_of[tenant]

    def busiest_tenant(self) -> str:
        """Return the tenant with the most slots."""
        return self._num_running_of.most_common(1)[0][0]

    def slots_of(self, tenant: str) -> list[int]:
        """Return the slots of a tenant. Looks at every running sequence."""
        occupied = np.flatnonzero(self._columns.sequence_id != VACANT).tolist()
        return [slot for slot in occupied if self.at(slot).sequence.request.tenant == tenant]

    def get(self, sequence_id: int) -> State | None:
        """Return a sequence's state; None if it finished or is unknown."""
        return self._states.get(sequence_id)

    def at(self, slot: int) -> Prefilling | Decoding:
        """Return the state of the sequence in a slot."""
        state = self._states[self._columns.sequence_id.item(slot)]
        assert isinstance(state, (Decoding, Prefilling)), f"slot {slot} is vacant"
        return state

    def blocks(self, slot: int) -> BlockLease:
        """Return the block lease of the sequence in a slot."""
        return self.at(slot).lease.blocks

    def add(self, sequence: Sequence) -> None:
        """Add a sequence in state Waiting."""
        self._states[sequence.sequence_id] = Waiting(sequence)
        self._num_of_tenant[sequence.request.tenant] += 1
        self.num_waiting_tokens += sequence.num_prompt

    def admit(self, state: Waiting | Preempted, blocks: BlockLease, num_cached: int) -> int:
        """Give a sequence a slot, and blocks that hold its first `num_cached` tokens. Returns the slot."""
        slot = self._free_slots.pop()
        self._num_running_of[state.sequence.request.tenant] += 1
        self._columns.occupy(slot, state.sequence, num_cached, blocks.capacity)
        self._move(state, Admit(Lease(slot, blocks)))
        return slot

    def start_decoding(self, state: Prefilling) -> None:
        """Move a sequence to Decoding once all its known tokens are planned."""
        self._columns.set_decoding(state.lease.slot, True)
        self._move(state, PrefillPlanned())

    def preempt(self, slot: int) -> Sequence:
        """Preempt the sequence in a slot: free its slot and release its blocks. Returns the sequence."""
        state = self.at(slot)
        self._move(state, Preempt())
        return state.sequence

    def end(self, state: State, reason: FinishReason) -> None:
        """End a sequence; its full blocks stay in the prefix cache."""
        if isinstance(state, Decoding):
            self.cache_known_blocks(state.lease.slot)
        self._move(state, End(reason))

    def cache_known_blocks(self, slot: int) -> None:
        """Put the full blocks of a decoding sequence's known tokens into the prefix index."""
        state = self.at(slot)
        blocks, chain = state.lease.blocks, state.sequence.chain
        known = self._columns.known(slot)
        chain.extend(known)
        self._kv.cache_full_blocks(blocks, chain, len(known) - 1, known)
        self._columns.num_hashed_tokens[slot] = blocks.num_hashed_tokens

    def _move(self, state: State, event: Event) -> None:
        transition = advance(state, event)
        sequence = transition.state.sequence
        if transition.released is not None:
            if self.on_release is not None:
                self.on_release(transition.released.slot)
            self._columns.vacate(transition.released.slot, sequence)
            self._free_slots.append(transition.released.slot)
            self._num_running_of[sequence.request.tenant] -= 1
            if isinstance(event, End):
                self._kv.end(transition.released.blocks)
            else:
                self._kv.release(transition.released.blocks)
        was_waiting = isinstance(state, Waiting | Preempted)
        is_waiting = isinstance(transition.state, Waiting | Preempted)
        self.num_waiting_tokens += (is_waiting - was_waiting) * sequence.num_prompt
        if isinstance(transition.state, Finished):
            del self._states[sequence.sequence_id]
            self._forget_one_of(sequence.request.tenant)
        else:
            self._states[sequence.sequence_id] = transition.state

    def _forget_one_of(self, tenant: str) -> None:
        self._num_of_tenant[tenant] -= 1
        if not self._num_of_tenant[tenant]:
            del self._num_of_tenant[tenant], self._num_running_of[tenant]
