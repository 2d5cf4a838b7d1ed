"""The life of a sequence: states that own their resources, and the only function that moves between them.

Each state is a type. Only states that hold a lease expose blocks; a transition consumes one state and
returns the next. Decoding one more token is no transition.

    Waiting --Admit--> Prefilling --PromptPlanned--> Decoding --End--> Finished | Sending
       ^ InputReady        |  Preempt                    |  Preempt
    AwaitingInput          +------> Preempted <----------+
                                       | Admit --> Prefilling
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import assert_never

from tokenspeed_core.api.sampling import FinishReason
from tokenspeed_core.kv_cache.lease import BlockLease, LeaseSpentError
from tokenspeed_core.scheduler.sequence import Sequence


class IllegalMoveError(RuntimeError):
    """An event that a state does not take: our own mistake."""


@dataclass(slots=True, eq=False)
class Lease:
    """A sequence's slot and blocks. Linear: `pass_on` uses it up."""

    slot: int
    blocks: BlockLease
    _is_spent: bool = field(default=False, repr=False)

    def pass_on(self) -> Lease:
        """Return a fresh lease of the same things; this one is spent. Raises LeaseSpentError the second time."""
        if self._is_spent:
            raise LeaseSpentError("a lease was used after it was passed on")
        self._is_spent = True
        return Lease(self.slot, self.blocks)


@dataclass(frozen=True, slots=True, eq=False)
class Waiting:
    """Ready to run; holds nothing."""

    sequence: Sequence


@dataclass(frozen=True, slots=True, eq=False)
class AwaitingInput:
    """Waits for something else to be ready (a grammar, an encoder, a remote cache); holds nothing."""

    sequence: Sequence
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class Prefilling:
    """Has a slot; part of its known tokens is still to be computed."""

    sequence: Sequence
    lease: Lease


@dataclass(frozen=True, slots=True, eq=False)
class Decoding:
    """Has a slot; all its known tokens are planned, each step may add some."""

    sequence: Sequence
    lease: Lease


@dataclass(frozen=True, slots=True, eq=False)
class Preempted:
    """Lost its slot and blocks to others; will compute its tokens again (or find them cached)."""

    sequence: Sequence


@dataclass(frozen=True, slots=True, eq=False)
class Sending:
    """Finished for the user; its blocks are kept until a transfer is done."""

    sequence: Sequence
    blocks: BlockLease
    reason: FinishReason


@dataclass(frozen=True, slots=True, eq=False)
class Finished:
    """Over. Holds nothing."""

    sequence: Sequence
    reason: FinishReason


State = Waiting | AwaitingInput | Prefilling | Decoding | Preempted | Sending | Finished


@dataclass(frozen=True, slots=True, eq=False)
class InputReady:
    """What the sequence waited for is there."""


@dataclass(frozen=True, slots=True, eq=False)
class Admit:
    """The sequence gets a slot and blocks."""

    lease: Lease


@dataclass(frozen=True, slots=True, eq=False)
class PromptPlanned:
    """The last chunk of its known tokens is in a plan."""


@dataclass(frozen=True, slots=True, eq=False)
class Preempt:
    """Its slot and blocks are needed by others."""


@dataclass(frozen=True, slots=True, eq=False)
class End:
    """It is over: finished, aborted or failed. `sends` keeps its blocks for a transfer."""

    reason: FinishReason
    sends: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class TransferDone:
    """The transfer that kept its blocks is over."""


Event = InputReady | Admit | PromptPlanned | Preempt | End | TransferDone


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """A transition's outcome: the next state, and what the caller must give back."""

    state: State
    slot: int | None = None
    blocks: BlockLease | None = None


def advance(state: State, event: Event) -> Move:
    """Consume a state and return the next. Raises IllegalMoveError for a pair that has no meaning."""
    match state:
        case Waiting(sequence) | Preempted(sequence):
            match event:
                case Admit(lease):
                    return Move(Prefilling(sequence, lease.pass_on()))
                case End(reason):
                    return Move(Finished(sequence, reason))
                case InputReady() | PromptPlanned() | Preempt() | TransferDone():
                    return _illegal(state, event)
                case _:
                    assert_never(event)
        case AwaitingInput(sequence):
            match event:
                case InputReady():
                    return Move(Waiting(sequence))
                case End(reason):
                    return Move(Finished(sequence, reason))
                case Admit() | PromptPlanned() | Preempt() | TransferDone():
                    return _illegal(state, event)
                case _:
                    assert_never(event)
        case Prefilling(sequence, lease):
            match event:
                case PromptPlanned():
                    return Move(Decoding(sequence, lease.pass_on()))
                case Preempt() | End():
                    return _leave(sequence, lease, event)
                case InputReady() | Admit() | TransferDone():
                    return _illegal(state, event)
                case _:
                    assert_never(event)
        case Decoding(sequence, lease):
            match event:
                case Preempt() | End():
                    return _leave(sequence, lease, event)
                case InputReady() | Admit() | PromptPlanned() | TransferDone():
                    return _illegal(state, event)
                case _:
                    assert_never(event)
        case Sending(sequence, blocks, reason):
            match event:
                case TransferDone():
                    return Move(Finished(sequence, reason), blocks=blocks)
                case InputReady() | Admit() | PromptPlanned() | Preempt() | End():
                    return _illegal(state, event)
                case _:
                    assert_never(event)
        case Finished():
            return _illegal(state, event)
        case _:
            assert_never(state)


def _leave(sequence: Sequence, lease: Lease, event: Preempt | End) -> Move:
    held = lease.pass_on()
    match event:
        case Preempt():
            return Move(Preempted(sequence), held.slot, held.blocks)
        case End(reason, sends=True):
            return Move(Sending(sequence, held.blocks, reason), held.slot)
        case End(reason):
            return Move(Finished(sequence, reason), held.slot, held.blocks)
        case _:
            assert_never(event)


def _illegal(state: State, event: Event) -> Move:
    raise IllegalMoveError(
        f"a sequence that is {type(state).__name__} cannot take {type(event).__name__}"
    )
