"""The built-in scheduling policies. Pure functions: the scheduler applies their decisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tokenspeed_core.api.policy import (
    Candidate,
    Decision,
    Limits,
    Policy,
    QueuedSequence,
    Room,
    View,
)
from tokenspeed_core.api.step import I32


@dataclass(frozen=True, slots=True)
class Ordered:
    """Decodes first, then running prompts, then admissions; each in order of arrival, or of priority and arrival."""

    by_priority: bool

    def __str__(self) -> str:
        return "priority" if self.by_priority else "fcfs"

    def key(self, sequence: QueuedSequence) -> tuple[int, int]:
        """Return (priority, arrival), or (0, arrival) for first come, first served."""
        return (sequence.priority if self.by_priority else 0, sequence.arrival)

    def decide(self, view: View, limits: Limits) -> Decision:
        """Run every decode, then prompts within the budget. Preempt the least important rows if pages are short."""
        num_query = view.num_query_tokens.copy()
        victims = np.zeros(0, np.int32)
        if int(view.num_new_pages.sum()) > limits.num_available_pages:
            num_query, victims = self._make_room(view, limits)
        num_decodes = view.num_decodes
        budget = limits.token_budget - int(num_query[:num_decodes].sum())
        if num_decodes < len(num_query):
            rank = self._rank(view)[num_decodes:]
            order = num_decodes + np.lexsort((view.arrival[num_decodes:], rank))
            num_query[order] = _chunks(num_query[order], budget, limits)
        return Decision(num_query, victims)

    def admit(self, candidate: Candidate, room: Room) -> int:
        """Admit a candidate if all its tokens fit without the pages promised to running sequences.

        One more page per decoding sequence stays free, so that the admission does not cause a preemption at once.
        """
        reserve = 0 if room.is_alone else room.num_promised_pages + room.num_decoding
        needed = candidate.num_new_pages + candidate.num_idle_pages
        if needed + reserve > room.num_available_pages:
            return 0
        rest = candidate.num_tokens - candidate.num_cached_tokens
        if not room.is_chunking:
            return rest if rest <= room.token_budget else 0
        return max(0, min(rest, room.token_budget))

    def _rank(self, view: View) -> I32:
        return view.priority if self.by_priority else np.zeros(len(view.slots), np.int32)

    def _make_room(self, view: View, limits: Limits) -> tuple[I32, I32]:
        """Give pages to the most important rows first. Returns the query tokens of each row and the victims.

        A row is preempted only if the pages that are pending already do not suffice.
        """
        order = np.lexsort((view.arrival, self._rank(view)))
        num_query = view.num_query_tokens.copy()
        available, pending = limits.num_available_pages, limits.num_pending_pages
        victims: list[int] = []
        last = len(order)
        for position, row in enumerate(order):
            if position >= last:
                break
            need = int(view.num_new_pages[row])
            if need <= available:
                available -= need
                continue
            num_query[row] = 0
            while need > available + pending and last - 1 > position:
                last -= 1
                victims.append(int(order[last]))
                pending += int(view.num_held_pages[order[last]])
            pending -= max(0, need - available)
            available = max(0, available - need)
        num_query[victims] = 0
        return num_query, np.asarray(victims, np.int32)


def _chunks(rest: I32, budget: int, limits: Limits) -> I32:
    """Return how many tokens of each prompt to compute, int32 [N].

    `rest` int32 [N] are the remaining tokens of each prompt, in order of descending priority.
    """
    before = np.cumsum(rest) - rest
    if not limits.is_chunking:
        budget = max(budget, int(rest[0]))  # a longer prompt runs alone
        return np.where(before + rest <= budget, rest, 0).astype(np.int32)
    chunks: I32 = np.clip(min(budget, limits.max_prefill_tokens) - before, 0, rest)
    return chunks.astype(np.int32)


POLICIES: Mapping[str, Policy] = {
    "fcfs": Ordered(by_priority=False),
    "priority": Ordered(by_priority=True),
}
