"""The states of a sequence and the transitions between them.

Each state is a type, and only states with a lease have blocks. A transition consumes a state and returns the next
one. Decoding one more token is not a transition.

    Waiting --Admit--> Prefilling --PrefillPlanned--> Decoding --End--> Finished
                          |  Preempt                     |  Preempt
                          +-------> Preempted <----------+
                                       | Admit --> Prefilling
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import assert_never

from tokenspeed_core.api.sampling import FinishReason
from tokenspeed_core.kv_cache.lease import BlockLease, LeaseSpentError
from tokenspeed_core.scheduler.sequence import Sequence


class IllegalTransitionError(RuntimeError):
    """A state received an event that it does not accept. This is a bug in the scheduler."""


@dataclass(slots=True, eq=False)
class Lease:
    """A sequence's slot and blocks. Each transition that keeps them passes them on to a new lease."""

    slot: int
    blocks: BlockLease
    _is_spent: bool = field(default=False, repr=False)

    def pass_on(self) -> Lease:
        """Spend this lease and return a new one. Raises LeaseSpentError on the second call."""
        if self._is_spent:
            raise LeaseSpentError("a lease was used after its ownership was transferred")
        self._is_spent = True
        return Lease(self.slot, self.blocks)


@dataclass(frozen=True, slots=True, eq=False)
class Waiting:
    """In the queue. Holds nothing."""

    sequence: Sequence


@dataclass(frozen=True, slots=True, eq=False)
class Prefilling:
    """Has a slot; some of its known tokens are not planned yet."""

    sequence: Sequence
    lease: Lease


@dataclass(frozen=True, slots=True, eq=False)
class Decoding:
    """Has a slot; all its known tokens are planned, and each step may add some."""

    sequence: Sequence
    lease: Lease


@dataclass(frozen=True, slots=True, eq=False)
class Preempted:
    """Back in the queue after it lost its slot and blocks. Its tokens are computed again or found in the cache."""

    sequence: Sequence


@dataclass(frozen=True, slots=True, eq=False)
class Finished:
    """Ended. Holds nothing."""

    sequence: Sequence
    reason: FinishReason


State = Waiting | Prefilling | Decoding | Preempted | Finished


@dataclass(frozen=True, slots=True, eq=False)
class Admit:
    """The sequence gets a slot and blocks."""

    lease: Lease


@dataclass(frozen=True, slots=True, eq=False)
class PrefillPlanned:
    """The last chunk of its known tokens is in a plan."""


@dataclass(frozen=True, slots=True, eq=False)
class Preempt:
    """Other sequences need its slot and blocks."""


@dataclass(frozen=True, slots=True, eq=False)
class End:
    """The sequence finished, was aborted or failed."""

    reason: FinishReason


Event = Admit | PrefillPlanned | Preempt | End


@dataclass(frozen=True, slots=True, eq=False)
class Transition:
    """The next state, and the lease that the caller must give back, if any."""

    state: State
    released: Lease | None = None


def advance(state: State, event: Event) -> Transition:
    """Return the transition of a state by an event. Raises IllegalTransitionError if there is none."""
    match state:
        case Waiting(sequence) | Preempted(sequence):
            match event:
                case Admit(lease):
                    return Transition(Prefilling(sequence, lease.pass_on()))
                case End(reason):
                    return Transition(Finished(sequence, reason))
                case PrefillPlanned() | Preempt():
                    return _illegal(state, event)
                case _:
                    assert_never(event)
        case Prefilling(sequence, lease):
            match event:
                case PrefillPlanned():
                    return Transition(Decoding(sequence, lease.pass_on()))
                case Preempt():
                    return Transition(Preempted(sequence), lease.pass_on())
                case End(reason):
                    return Transition(Finished(sequence, reason), lease.pass_on())
                case Admit():
                    return _illegal(state, event)
                case _:
                    assert_never(event)
        case Decoding(sequence, lease):
            match event:
                case Preempt():
                    return Transition(Preempted(sequence), lease.pass_on())
                case End(reason):
                    return Transition(Finished(sequence, reason), lease.pass_on())
                case Admit() | PrefillPlanned():
                    return _illegal(state, event)
                case _:
                    assert_never(event)
        case Finished():
            return _illegal(state, event)
        case _:
            assert_never(state)


def _illegal(state: State, event: Event) -> Transition:
    raise IllegalTransitionError(
        f"a sequence in state {type(state).__name__} cannot handle {type(event).__name__}"
    )
