"""What a policy is asked and answers. Imports no array library, so that naming these costs a plugin nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from tokenspeed_core.api.step import I32, I64


@dataclass(frozen=True, slots=True)
class Limits:
    """What one step may use. Sizes are in tokens, room in pages."""

    budget: int  # query tokens of the whole step
    max_prefill: int  # query tokens of all prompts together, where prompts are cut
    is_chunking: bool  # False: a prompt runs whole, however long
    available_pages: int  # free or evictable now
    coming_pages: int  # released, and reusable when the steps in flight are over


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """Read-only columns of the rows that want to run, decodes first; each of length N."""

    slots: I32
    num_decodes: int
    num_query: I32  # tokens wanted: one or one plus drafts; what remains of a prompt
    pages: I32  # pages that a row must get to run at all (a prompt: for its next token)
    held: I32  # pages that preempting the row would free
    priority: I32  # lower is more important
    arrival: I64


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """Query tokens per row of the view (0: not in this step), and the rows to preempt."""

    num_query: I32
    victims: I32  # indices into the view


@dataclass(frozen=True, slots=True)
class Candidate:
    """The waiting sequence that comes next."""

    num_tokens: int  # known
    num_hit: int  # of them, found in the prefix cache
    pages: int  # for all known tokens and the next one, beyond the hit's
    idle_pages: int  # of the hit, which are available ones now


@dataclass(frozen=True, slots=True)
class Room:
    """What is left for admissions in this step."""

    budget: int
    is_chunking: bool
    available_pages: int
    promised_pages: int  # that running prompts still need
    num_decoding: int
    is_alone: bool  # nothing runs, nothing is in flight


@runtime_checkable
class Policy(Protocol):
    """Decides admissions, chunks and victims. Stateless.

    No chunk goes past the tokens that are known: what a prompt is given beyond them is cut off, and so is what a first
    chunk is given beyond the budget. A policy that raises, lets a row run without its pages or names a victim twice or
    one that runs ends the engine, with a line that names the plugin.
    """

    def key(self, priority: int, arrival: int) -> tuple[int, int]:
        """Return the sort key of a waiting sequence; the least comes first."""

    def decide(self, view: View, limits: Limits) -> Decision:
        """Share a step's budget and pages among the running rows."""

    def admit(self, candidate: Candidate, room: Room) -> int:
        """Return the tokens of the candidate's first chunk; 0: not in this step."""
