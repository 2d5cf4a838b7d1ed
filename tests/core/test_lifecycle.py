"""The states of a sequence: every pair of a state and an event."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import get_args

import numpy as np
import pytest
from tokenspeed_testing.requests import request

from tokenspeed_core.api.sampling import FinishReason
from tokenspeed_core.kv_cache.hashing import HashChain
from tokenspeed_core.kv_cache.lease import BlockLease, LeaseSpentError
from tokenspeed_core.scheduler.lifecycle import (
    Admit,
    Decoding,
    End,
    Event,
    Finished,
    IllegalTransitionError,
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

SLOT, BLOCKS = 3, [5, 6]


def sequence() -> Sequence:
    submit = request(7, [1, 2, 3])
    return Sequence(7, submit, 0, 1, HashChain(4, "", 0), np.asarray([1, 2, 3], np.int32))


def blocks() -> BlockLease:
    return BlockLease([list(BLOCKS)], capacity=8)


STATES: dict[str, Callable[[], State]] = {
    "Waiting": lambda: Waiting(sequence()),
    "Prefilling": lambda: Prefilling(sequence(), Lease(SLOT, blocks())),
    "Decoding": lambda: Decoding(sequence(), Lease(SLOT, blocks())),
    "Preempted": lambda: Preempted(sequence()),
    "Finished": lambda: Finished(sequence(), FinishReason.STOP),
}
EVENTS: dict[str, Callable[[], Event]] = {
    "Admit": lambda: Admit(Lease(SLOT, blocks())),
    "PrefillPlanned": PrefillPlanned,
    "Preempt": Preempt,
    "End": lambda: End(FinishReason.LENGTH),
}
NEXT = {  # (state, event): the next state; every other pair is illegal
    ("Waiting", "Admit"): Prefilling,
    ("Waiting", "End"): Finished,
    ("Prefilling", "PrefillPlanned"): Decoding,
    ("Prefilling", "Preempt"): Preempted,
    ("Prefilling", "End"): Finished,
    ("Decoding", "Preempt"): Preempted,
    ("Decoding", "End"): Finished,
    ("Preempted", "Admit"): Prefilling,
    ("Preempted", "End"): Finished,
}


def lease_of(state: State) -> Lease | None:
    return state.lease if isinstance(state, Prefilling | Decoding) else None


def blocks_of(state: State) -> list[int]:
    lease = lease_of(state)
    return [] if lease is None else lease.blocks.tables[0]


def test_cases_cover_every_state_and_event() -> None:
    assert {type(make()) for make in STATES.values()} == set(get_args(State))
    assert {type(make()) for make in EVENTS.values()} == set(get_args(Event))


@pytest.mark.parametrize("event_name", EVENTS)
@pytest.mark.parametrize("state_name", STATES)
def test_each_pair_has_a_next_state_or_an_error(state_name: str, event_name: str) -> None:
    state, event = STATES[state_name](), EVENTS[event_name]()
    expected = NEXT.get((state_name, event_name))
    if expected is None:
        with pytest.raises(IllegalTransitionError, match=rf"{state_name} .*{type(event).__name__}"):
            advance(state, event)
        return
    transition = advance(state, event)
    assert type(transition.state) is expected
    assert transition.state.sequence is state.sequence


@pytest.mark.parametrize(("state_name", "event_name"), NEXT)
def test_lease_is_kept_or_released_once(state_name: str, event_name: str) -> None:
    state, event = STATES[state_name](), EVENTS[event_name]()
    had = [*blocks_of(state), *(event.lease.blocks.tables[0] if isinstance(event, Admit) else [])]
    had_slot = lease_of(state) is not None or isinstance(event, Admit)
    transition = advance(state, event)
    kept, released = lease_of(transition.state), transition.released
    leases = [lease for lease in (kept, released) if lease is not None]
    assert [lease.slot for lease in leases] == [SLOT] * had_slot
    assert sorted(block for lease in leases for block in lease.blocks.tables[0]) == sorted(had)


def test_illegal_event_does_not_spend_the_lease() -> None:
    state = Decoding(sequence(), Lease(SLOT, blocks()))
    with pytest.raises(IllegalTransitionError):
        advance(state, Admit(Lease(SLOT, blocks())))
    assert isinstance(advance(state, Preempt()).state, Preempted)


@pytest.mark.parametrize("event_name", ["PrefillPlanned", "Preempt", "End"])
def test_consumed_state_cannot_be_used_again(event_name: str) -> None:
    state = Prefilling(sequence(), Lease(SLOT, blocks()))
    advance(state, PrefillPlanned())
    with pytest.raises(LeaseSpentError):
        advance(state, EVENTS[event_name]())


def test_lease_admits_one_sequence() -> None:
    admit = Admit(Lease(SLOT, blocks()))
    advance(Waiting(sequence()), admit)
    with pytest.raises(LeaseSpentError):
        advance(Waiting(sequence()), admit)


@pytest.mark.parametrize("use", [BlockLease.spend, BlockLease.check])
def test_released_blocks_cannot_be_used(use: Callable[[BlockLease], object]) -> None:
    lease = blocks()
    lease.spend()
    assert lease.tables == []
    with pytest.raises(LeaseSpentError, match="after its release"):
        use(lease)


def test_only_running_states_have_a_lease() -> None:
    exposing = {
        kind
        for kind in get_args(State)
        if {"lease", "blocks"} & {each.name for each in fields(kind)}
    }
    assert exposing == {Prefilling, Decoding}
