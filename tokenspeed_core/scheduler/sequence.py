"""A sequence: one of the `n` outputs of a request, as the scheduler keeps it."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import monotonic

import numpy as np

from tokenspeed_core.api.step import I32
from tokenspeed_core.engine.messages import Submit
from tokenspeed_core.kv_cache.hashing import HashChain


@dataclass(slots=True, eq=False)
class Sequence:
    """The part of a sequence that survives preemption: its request, tokens and hash chain.

    While the sequence has a slot, its new tokens are in the columns; `tokens` is updated when it loses the slot.
    """

    sequence_id: int
    request: Submit
    seed: int
    arrival: int  # order of arrival
    chain: HashChain
    tokens: I32  # prompt and output
    num_cached: int = -1  # prompt tokens found in the cache at the first admission; -1 before
    # Follows the output. The engine's late source creates and uses it.
    grammar: object | None = None
    last_step: int = 0  # id of the last step that it was planned in before it lost its slot
    # Number of prompt tokens for which no log-probability remains to be computed.
    num_scored: int = 2**31 - 1
    # On the monotonic clock, in seconds; `admitted_at` is 0 unless its first token is awaited.
    arrived_at: float = field(default_factory=monotonic)
    admitted_at: float = 0.0

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt)

    @property
    def max_len(self) -> int:
        """Length, prompt and output, at which the sequence ends."""
        return self.num_prompt + self.request.max_tokens

    @property
    def max_cached(self) -> int:
        """Known tokens that a prefix hit may cover, plus one: log-probabilities need tokens to be computed."""
        return min(len(self.tokens), self.num_scored + 1)

    def take_scored(self, start: int, end: int) -> range:
        """Return the tokens of the chunk `[start, end)` before those that need log-probabilities, once each."""
        end = min(end, self.num_prompt - 1)
        scored = range(max(start, self.num_scored), end)
        self.num_scored = max(self.num_scored, end)
        return scored

    def append(self, tokens: I32) -> None:
        """Add tokens that arrived after the slot was lost."""
        self.tokens = np.concatenate((self.tokens, tokens))
