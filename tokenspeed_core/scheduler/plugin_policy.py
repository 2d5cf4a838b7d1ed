"""Finds the scheduling policy that a user named, and checks the answers of policy plugins."""

from __future__ import annotations

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
from tokenspeed_core.plugins.catalog import Catalog, make
from tokenspeed_core.plugins.entry import Entry
from tokenspeed_core.scheduler.policy import POLICIES


def find_policy(name: str, catalog: Catalog) -> Policy:
    """Return a built-in policy, or create the one that a plugin's entry point names.

    Raises PluginError if the name is unknown or the plugin does not return a Policy.
    """
    if name in POLICIES:
        return POLICIES[name]
    entry = catalog.get("policies", name, flag="--schedule-policy")
    factory = catalog.need(entry, object)
    policy = make(entry, entry.value, factory, Policy)  # type: ignore[type-abstract]
    return PluginPolicy(entry, policy)


@dataclass(frozen=True, slots=True)
class PluginPolicy:
    """A plugin's policy. Each method raises PluginError if the plugin raises or its answer is invalid."""

    entry: Entry
    policy: Policy

    def __str__(self) -> str:
        return f"{self.entry.name} of {self.entry.distribution} {self.entry.version}"

    def key(self, sequence: QueuedSequence) -> tuple[int, int]:
        """Return the policy's sort key."""
        factory = f"{self.entry.value}.key"
        return make(self.entry, factory, lambda: self.policy.key(sequence), tuple)

    def decide(self, view: View, limits: Limits) -> Decision:
        """Return the policy's decision, with at most the tokens that each row wants."""
        factory = f"{self.entry.value}.decide"
        return make(self.entry, factory, lambda: _decide(self.policy, view, limits), Decision)

    def admit(self, candidate: Candidate, room: Room) -> int:
        """Return the size of the candidate's first chunk, in tokens."""
        factory = f"{self.entry.value}.admit"
        return make(self.entry, factory, lambda: int(self.policy.admit(candidate, room)), int)


def _decide(policy: Policy, view: View, limits: Limits) -> Decision:
    """Return the policy's decision. Raises ValueError if it is invalid."""
    decision = policy.decide(view, limits)
    num_query = np.clip(decision.num_query_tokens, 0, view.num_query_tokens).astype(np.int32)
    runs = num_query > 0
    victims = [int(victim) for victim in decision.victims]
    num_pages = int(view.num_new_pages[runs].sum())
    if num_pages > limits.num_available_pages:
        raise ValueError(
            f"the scheduled rows need {num_pages} pages, but {limits.num_available_pages} are available"
        )
    if runs[victims].any():
        raise ValueError(f"a row is both scheduled and preempted: victims are {victims}")
    if len(set(victims)) < len(victims):
        raise ValueError(f"a row is preempted twice: victims are {victims}")
    return Decision(num_query, decision.victims)
