"""The policy: pure functions from a view of the running sequences and the limits to a decision.

Nothing here changes anything. The same view gives the same decision; `scheduler.py` applies it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tokenspeed_core.api.policy import Candidate, Decision, Limits, Policy, Room, View
from tokenspeed_core.api.step import I32


@dataclass(frozen=True, slots=True)
class Ordered:
    """Decodes first, then prompts, then admissions; among equals by (priority, arrival) or arrival alone."""

    by_priority: bool

    def __str__(self) -> str:
        return "priority" if self.by_priority else "fcfs"

    def key(self, priority: int, arrival: int) -> tuple[int, int]:
        """Return (priority, arrival), or (0, arrival) for first come, first served."""
        return (priority if self.by_priority else 0, arrival)

    def decide(self, view: View, limits: Limits) -> Decision:
        """Run every decode, then prompts while the budget lasts; preempt the least important for blocks."""
        wanted = view.num_query_tokens.copy()
        victims = np.zeros(0, np.int32)
        if int(view.num_new_blocks.sum()) > limits.num_available_blocks:
            wanted, victims = self._make_room(view, limits)
        num = view.num_decodes
        budget = limits.token_budget - int(wanted[:num].sum())
        if num < len(wanted):
            order = num + np.lexsort((view.arrival[num:], self._rank(view)[num:]))
            wanted[order] = self._chunks(wanted[order], budget, limits)
        return Decision(wanted, victims)

    def admit(self, candidate: Candidate, room: Room) -> int:
        """Admit when the whole prompt finds room beside what running ones were promised.

        One block per decoding row stays free, so that an admission does not cause a preemption at once.
        """
        reserve = 0 if room.is_alone else room.num_promised_blocks + room.num_decoding
        if (
            candidate.num_new_blocks + candidate.num_idle_blocks + reserve
            > room.num_available_blocks
        ):
            return 0
        rest = candidate.num_tokens - candidate.num_cached_tokens
        if not room.is_chunking:
            return rest if rest <= room.token_budget else 0
        return max(0, min(rest, room.token_budget))

    def _chunks(self, rest: I32, budget: int, limits: Limits) -> I32:
        """Cut the prompts, the most important first, to the budget."""
        before = np.cumsum(rest) - rest
        if not limits.is_chunking:
            return np.where(before + rest <= max(budget, int(rest[0])), rest, 0).astype(np.int32)
        chunks: I32 = np.clip(min(budget, limits.max_prefill_tokens) - before, 0, rest).astype(
            np.int32
        )
        return chunks

    def _rank(self, view: View) -> I32:
        return view.priority if self.by_priority else np.zeros(len(view.slots), np.int32)

    def _make_room(self, view: View, limits: Limits) -> tuple[I32, I32]:
        """Give blocks to the most important rows; name victims only for what is not already on its way."""
        order = np.lexsort((view.arrival, self._rank(view)))
        wanted = view.num_query_tokens.copy()
        available, coming = limits.num_available_blocks, limits.num_pending_blocks
        victims: list[int] = []
        last = len(order)
        for position, row in enumerate(order):
            if position >= last:
                break
            need = int(view.num_new_blocks[row])
            if need <= available:
                available -= need
                continue
            wanted[row] = 0
            while need > available + coming and last - 1 > position:
                last -= 1
                victims.append(int(order[last]))
                coming += int(view.num_held_blocks[order[last]])
            coming -= max(0, need - available)
            available = max(0, available - need)
        wanted[victims] = 0
        return wanted, np.asarray(victims, np.int32)


POLICIES: Mapping[str, Policy] = {
    "fcfs": Ordered(by_priority=False),
    "priority": Ordered(by_priority=True),
}
