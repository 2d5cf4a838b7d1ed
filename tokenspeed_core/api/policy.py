"""The contract of scheduling policies. Imports no array library, so that a policy plugin stays cheap to import."""

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
    num_available_blocks: int  # free or evictable now
    num_pending_blocks: int  # released; reusable once the steps in flight finished


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """The sequences that could run in this step, as read-only columns of length N. Decodes come first."""

    slots: I32
    num_decodes: int
    # Requested tokens: 1 plus draft tokens for a decode, the rest of the prompt otherwise.
    num_query_tokens: I32
    num_new_blocks: I32  # needed to run at all; for a prompt, to run one token
    num_held_blocks: I32  # that preemption would release
    priority: I32  # lower is more important
    arrival: I64  # order of arrival


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """The rows that run in this step, and those to preempt."""

    num_query_tokens: I32  # per row of the view; 0: not in this step
    victims: I32  # indices of the rows to preempt


@dataclass(frozen=True, slots=True)
class Candidate:
    """The first sequence of the waiting queue."""

    num_tokens: int  # prompt, and output if it was preempted
    num_cached_tokens: int  # of them, found in the prefix cache
    num_new_blocks: int  # for all its tokens and the next one, without the cached ones
    num_idle_blocks: int  # of the cached ones, counted as available now


@dataclass(frozen=True, slots=True)
class Room:
    """The budget that is left for admissions in this step."""

    token_budget: int
    is_chunking: bool
    num_available_blocks: int
    num_promised_blocks: int  # that running prompts still need
    num_decoding: int
    is_alone: bool  # nothing runs and no step is in flight


@runtime_checkable
class Policy(Protocol):
    """Decides which sequences run, how prompts are cut, and which sequences are preempted.

    A policy keeps no state: equal arguments give equal answers. The scheduler reduces answers that exceed what a
    sequence wants or the budget allows. It ends the engine, with an error that names the plugin, if a policy raises,
    runs a row without its blocks, names a victim twice or one that runs, or runs nothing while no step is in flight.
    """

    def key(self, priority: int, arrival: int) -> tuple[int, int]:
        """Return the sort key of a waiting sequence. The smallest comes first."""

    def decide(self, view: View, limits: Limits) -> Decision:
        """Share the step's tokens and blocks among the running sequences."""

    def admit(self, candidate: Candidate, room: Room) -> int:
        """Return the number of tokens of the candidate's first chunk; 0: do not admit it in this step."""
