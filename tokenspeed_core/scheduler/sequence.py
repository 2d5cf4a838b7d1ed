"""One output of a request."""

from __future__ import annotations

from dataclasses import dataclass

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
    last_step: int = 0  # id of the last step that it was planned in before it lost its slot

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt)

    @property
    def max_len(self) -> int:
        """Length, prompt and output, at which the sequence ends."""
        return self.num_prompt + self.request.max_tokens

    def append(self, tokens: I32) -> None:
        """Add tokens that arrived after the slot was lost."""
        self.tokens = np.concatenate((self.tokens, tokens))
