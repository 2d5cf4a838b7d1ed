"""The contract of scheduling policies. Imports no array library, so that a policy plugin stays cheap to import.

Pages are the unit of memory: a page holds one or more blocks of one cache group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from tokenspeed_core.api.step import I32, I64


@dataclass(frozen=True, slots=True)
class Limits:
    """The budget of the running sequences in one step."""

    token_budget: int  # query tokens of the whole step
    max_prefill_tokens: int  # query tokens of all prompts together, if chunked prefill is on
    is_chunking: bool  # chunked prefill is on; if off, a prompt runs whole, however long
    num_available_pages: int  # free or evictable now
    num_pending_pages: int  # released; reusable once the steps in flight finished


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """The sequences that could run in this step, as read-only columns of length N. Decodes come first."""

    slots: I64
    num_decodes: int
    # Requested tokens: 1 plus draft tokens for a decode, otherwise the remaining prompt tokens.
    num_query_tokens: I32
    num_new_pages: I32  # needed to run at all; for a prompt, to run one token
    num_held_pages: I32  # that preemption would release
    priority: I32  # lower is more important
    arrival: I64  # order of arrival


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """The rows that run in this step, and those to preempt."""

    num_query_tokens: I32  # per row of the view; 0: not in this step
    victims: I32  # indices of the rows to preempt


@dataclass(frozen=True, slots=True)
class QueuedSequence:
    """A sequence that enters the waiting queue, new or preempted."""

    priority: int  # lower is more important
    arrival: int  # order of arrival
    num_tokens: int  # prompt, and output if it was preempted
    max_tokens: int  # output tokens at which it ends
    tenant: str


@dataclass(frozen=True, slots=True)
class Candidate:
    """The first sequence of the waiting queue."""

    num_tokens: int  # prompt, and output if it was preempted
    num_cached_tokens: int  # those that are in the prefix cache
    num_new_pages: int  # needed for the tokens that are not cached, and for the next one
    num_idle_pages: int  # pages of cached tokens that count as available until it is admitted


@dataclass(frozen=True, slots=True)
class Room:
    """The budget that is left for admissions in this step."""

    token_budget: int
    is_chunking: bool
    num_available_pages: int
    num_promised_pages: int  # that running prompts still need
    num_decoding: int
    is_alone: bool  # nothing runs and no step is in flight


@runtime_checkable
class Policy(Protocol):
    """Decides which sequences run, how prompts are cut, and which sequences are preempted.

    A policy keeps no state: equal arguments give equal answers. The scheduler reduces answers that exceed what a
    sequence wants or the budget allows. It ends the engine, with an error that names the plugin, if a policy raises,
    runs a row without its pages, names a victim twice or one that runs, or runs nothing while no step is in flight.
    """

    def key(self, sequence: QueuedSequence) -> tuple[int, int]:
        """Return the sort key of a waiting sequence. The smallest comes first.

        Tenants take turns among sequences whose keys begin with the same number, such as 0 for all.
        """

    def decide(self, view: View, limits: Limits) -> Decision:
        """Share the step's tokens and pages among the running sequences."""

    def admit(self, candidate: Candidate, room: Room) -> int:
        """Return the number of tokens of the candidate's first chunk; 0: do not admit it in this step."""
