"""Every pair of a sequence's state and an event: the next state, or an error that names both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import get_args

import numpy as np
import pytest
from null_world import request

from tokenspeed_core.api.sampling import FinishReason
from tokenspeed_core.kv_cache.hashing import HashChain
from tokenspeed_core.kv_cache.lease import ABSENT, BlockLease, LeaseSpentError
from tokenspeed_core.scheduler.lifecycle import (
    Admit,
    AwaitingInput,
    Decoding,
    End,
    Event,
    Finished,
    IllegalMoveError,
    InputReady,
    Lease,
    Move,
    Preempt,
    Preempted,
    Prefilling,
    PromptPlanned,
    Sending,
    State,
    TransferDone,
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
    "AwaitingInput": lambda: AwaitingInput(sequence(), "a grammar"),
    "Prefilling": lambda: Prefilling(sequence(), Lease(SLOT, blocks())),
    "Decoding": lambda: Decoding(sequence(), Lease(SLOT, blocks())),
    "Preempted": lambda: Preempted(sequence()),
    "Sending": lambda: Sending(sequence(), blocks(), FinishReason.STOP),
    "Finished": lambda: Finished(sequence(), FinishReason.STOP),
}
EVENTS: dict[str, Callable[[], Event]] = {
    "InputReady": InputReady,
    "Admit": lambda: Admit(Lease(SLOT, blocks())),
    "PromptPlanned": PromptPlanned,
    "Preempt": Preempt,
    "End": lambda: End(FinishReason.LENGTH),
    "End, and send": lambda: End(FinishReason.LENGTH, sends=True),
    "TransferDone": TransferDone,
}
NEXT = {  # (state, event): the next state; every other pair is illegal
    ("Waiting", "Admit"): Prefilling,
    ("Waiting", "End"): Finished,
    ("Waiting", "End, and send"): Finished,
    ("AwaitingInput", "InputReady"): Waiting,
    ("AwaitingInput", "End"): Finished,
    ("AwaitingInput", "End, and send"): Finished,
    ("Prefilling", "PromptPlanned"): Decoding,
    ("Prefilling", "Preempt"): Preempted,
    ("Prefilling", "End"): Finished,
    ("Prefilling", "End, and send"): Sending,
    ("Decoding", "Preempt"): Preempted,
    ("Decoding", "End"): Finished,
    ("Decoding", "End, and send"): Sending,
    ("Preempted", "Admit"): Prefilling,
    ("Preempted", "End"): Finished,
    ("Preempted", "End, and send"): Finished,
    ("Sending", "TransferDone"): Finished,
}


def lease_of(state: State) -> Lease | None:
    return state.lease if isinstance(state, Prefilling | Decoding) else None


def blocks_of(state: State) -> list[int]:
    match state:
        case Prefilling(_, lease) | Decoding(_, lease):
            return lease.blocks.blocks()
        case Sending(_, held, _):
            return held.blocks()
        case Waiting() | AwaitingInput() | Preempted() | Finished():
            return []


def test_the_table_walks_every_state_and_every_event() -> None:
    assert {type(make()) for make in STATES.values()} == set(get_args(State))
    assert {type(make()) for make in EVENTS.values()} == set(get_args(Event))


@pytest.mark.parametrize("event_name", EVENTS)
@pytest.mark.parametrize("state_name", STATES)
def test_a_pair_of_state_and_event_has_its_next_state_or_an_error_naming_both(
    state_name: str, event_name: str
) -> None:
    state, event = STATES[state_name](), EVENTS[event_name]()
    expected = NEXT.get((state_name, event_name))
    if expected is None:
        with pytest.raises(
            IllegalMoveError, match=rf"is {state_name} cannot take {type(event).__name__}$"
        ):
            advance(state, event)
        return
    move = advance(state, event)
    assert type(move.state) is expected
    assert move.state.sequence is state.sequence


@pytest.mark.parametrize(("state_name", "event_name"), NEXT)
def test_a_move_keeps_slot_and_blocks_or_gives_each_back_once(
    state_name: str, event_name: str
) -> None:
    state, event = STATES[state_name](), EVENTS[event_name]()
    had = [*blocks_of(state), *(event.lease.blocks.blocks() if isinstance(event, Admit) else [])]
    had_slot = lease_of(state) is not None or isinstance(event, Admit)
    move = advance(state, event)
    given_back = move.blocks.blocks() if move.blocks is not None else []
    assert sorted([*blocks_of(move.state), *given_back]) == sorted(had)
    kept = lease_of(move.state)
    assert (kept is not None) + (move.slot is not None) == had_slot
    assert {kept.slot if kept is not None else None, move.slot} <= {None, SLOT}


def test_an_illegal_event_leaves_the_lease_to_its_state() -> None:
    state = Decoding(sequence(), Lease(SLOT, blocks()))
    with pytest.raises(IllegalMoveError):
        advance(state, TransferDone())
    assert isinstance(advance(state, Preempt()).state, Preempted)


@pytest.mark.parametrize("event_name", ["PromptPlanned", "Preempt", "End", "End, and send"])
def test_a_state_that_gave_its_lease_on_cannot_be_used_again(event_name: str) -> None:
    state = Prefilling(sequence(), Lease(SLOT, blocks()))
    advance(state, PromptPlanned())
    with pytest.raises(LeaseSpentError):
        advance(state, EVENTS[event_name]())


def test_a_lease_admits_one_sequence() -> None:
    admit = Admit(Lease(SLOT, blocks()))
    advance(Waiting(sequence()), admit)
    with pytest.raises(LeaseSpentError):
        advance(Waiting(sequence()), admit)


@pytest.mark.parametrize("use", [BlockLease.take, BlockLease.blocks, BlockLease.check])
def test_blocks_that_were_taken_cannot_be_used_again(use: Callable[[BlockLease], object]) -> None:
    lease = blocks()
    assert lease.take() == BLOCKS[::-1]
    with pytest.raises(LeaseSpentError, match="after it was released"):
        use(lease)


def test_a_lease_lists_last_blocks_first_and_leaves_out_absent_ones() -> None:
    assert BlockLease([[ABSENT, 4, 5], [7]]).blocks() == [5, 4, 7]


def test_only_states_that_hold_a_lease_expose_blocks() -> None:
    exposing = {
        kind
        for kind in get_args(State)
        if {"lease", "blocks"} & {each.name for each in fields(kind)}
    }
    assert exposing == {Prefilling, Decoding, Sending}
    assert {each.name for each in fields(Move)} == {"state", "slot", "blocks"}


def test_a_transfer_keeps_the_reason_that_the_sequence_ended_for() -> None:
    sending = advance(STATES["Decoding"](), End(FinishReason.STOP, sends=True)).state
    assert isinstance(sending, Sending)
    finished = advance(sending, TransferDone())
    assert isinstance(finished.state, Finished)
    assert finished.state.reason is FinishReason.STOP
    assert finished.blocks is sending.blocks
