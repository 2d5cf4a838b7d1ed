"""The scheduling policy that a user names. Where a plugin's fails, the engine ends in a line that says whose it is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tokenspeed_core.api.policy import Candidate, Decision, Limits, Policy, Room, View
from tokenspeed_core.plugins.catalog import Catalog, make
from tokenspeed_core.plugins.entry import Entry
from tokenspeed_core.scheduler.policy import POLICIES


def find_policy(name: str, catalog: Catalog) -> Policy:
    """Return the policy that users call `name`; a plugin's is made by the factory that its entry names.

    Raises PluginError, in one line, on an unknown name, and where the plugin makes no policy.
    """
    if name in POLICIES:
        return POLICIES[name]
    entry = catalog.get("policies", name)
    policy = make(entry, entry.value, catalog.need(entry, object), Policy)  # type: ignore[type-abstract]
    return PluginPolicy(entry, policy)


@dataclass(frozen=True, slots=True)
class PluginPolicy:
    """A plugin's policy: each method raises PluginError for what that raises, and for an answer that cannot be used."""

    entry: Entry
    policy: Policy

    def __str__(self) -> str:
        return f"{self.entry.name} of {self.entry.distribution}"

    def key(self, priority: int, arrival: int) -> tuple[int, int]:
        """Return the policy's sort key."""
        return make(
            self.entry, f"{self.entry.value}.key", lambda: self.policy.key(priority, arrival), tuple
        )

    def decide(self, view: View, limits: Limits) -> Decision:
        """Return the policy's decision, without what it gives a row beyond what that wants."""
        return make(
            self.entry,
            f"{self.entry.value}.decide",
            lambda: _decide(self.policy, view, limits),
            Decision,
        )

    def admit(self, candidate: Candidate, room: Room) -> int:
        """Return the tokens that the policy gives the candidate."""
        return make(
            self.entry,
            f"{self.entry.value}.admit",
            lambda: int(self.policy.admit(candidate, room)),
            int,
        )


def _decide(policy: Policy, view: View, limits: Limits) -> Decision:
    """Return a decision, cut to what the rows want. Raises what the policy does, or ValueError if it cannot be done."""
    decision = policy.decide(view, limits)
    num_query = np.clip(decision.num_query_tokens, 0, view.num_query_tokens).astype(np.int32)
    runs, victims = num_query > 0, list(map(int, decision.victims))
    if (
        view.num_new_blocks[runs].sum() > limits.num_available_blocks
        or runs[victims].any()
        or len(set(victims)) < len(victims)
    ):
        raise ValueError(
            "a row runs without its blocks or though it is a victim, or a victim is named twice"
        )
    return Decision(num_query, decision.victims)
