"""What a policy is asked and answers. Imports no array library, so that naming these costs a plugin nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from tokenspeed_core.api.step import I32, I64


@dataclass(frozen=True, slots=True)
class Limits:
    """What one step may use. Sizes are in tokens, room in blocks."""

    token_budget: int  # query tokens of the whole step
    max_prefill_tokens: int  # query tokens of all prompts together, where prompts are cut
    is_chunking: bool  # False: a prompt runs whole, however long
    num_available_blocks: int  # free or evictable now
    num_pending_blocks: int  # released, and reusable when the steps in flight are over


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """Read-only columns of the rows that want to run, decodes first; each of length N."""

    slots: I32
    num_decodes: int
    num_query_tokens: I32  # tokens wanted: one or one plus drafts; what remains of a prompt
    num_new_blocks: I32  # blocks that a row must get to run at all (a prompt: for its next token)
    num_held_blocks: I32  # blocks that preempting the row would free
    priority: I32  # lower is more important
    arrival: I64


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """Query tokens per row of the view (0: not in this step), and the rows to preempt."""

    num_query_tokens: I32
    victims: I32  # indices into the view


@dataclass(frozen=True, slots=True)
class Candidate:
    """The waiting sequence that comes next."""

    num_tokens: int  # known
    num_cached_tokens: int  # of them, found in the prefix cache
    num_new_blocks: int  # for all known tokens and the next one, beyond the hit's
    num_idle_blocks: int  # of the hit, which are available ones now


@dataclass(frozen=True, slots=True)
class Room:
    """What is left for admissions in this step."""

    token_budget: int
    is_chunking: bool
    num_available_blocks: int
    num_promised_blocks: int  # that running prompts still need
    num_decoding: int
    is_alone: bool  # nothing runs, nothing is in flight


@runtime_checkable
class Policy(Protocol):
    """Decides admissions, chunks and victims. Stateless.

    No chunk goes past the tokens that are known: what a prompt is given beyond them is cut off, and so is what a first
    chunk is given beyond the budget. A policy that raises, lets a row run without its blocks or names a victim twice or
    one that runs ends the engine, with a line that names the plugin.
    """

    def key(self, priority: int, arrival: int) -> tuple[int, int]:
        """Return the sort key of a waiting sequence; the least comes first."""

    def decide(self, view: View, limits: Limits) -> Decision:
        """Share a step's budget and blocks among the running rows."""

    def admit(self, candidate: Candidate, room: Room) -> int:
        """Return the tokens of the candidate's first chunk; 0: not in this step."""
