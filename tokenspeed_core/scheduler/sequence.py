"""One of the outputs of a request, as the scheduler knows it between slots."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tokenspeed_core.api.step import I32
from tokenspeed_core.engine.messages import Submit
from tokenspeed_core.kv_cache.hashing import HashChain


@dataclass(slots=True, eq=False)
class Sequence:
    """What outlives a preemption: the request, the tokens known so far, and the chain of their hashes.

    While the sequence holds a slot its tokens live in the columns there; `tokens` is brought up to date when
    it loses the slot. `last_step` is the last step that it was planned in while it had one.
    """

    sequence_id: int
    request: Submit
    seed: int
    arrival: int  # order of arrival, a number and not a time
    chain: HashChain
    tokens: I32  # prompt and output
    num_cached: int = -1  # prompt tokens found in the cache at the first admission; -1 before
    last_step: int = 0

    @property
    def num_prompt(self) -> int:
        """Tokens that the user sent."""
        return len(self.request.prompt)

    @property
    def max_len(self) -> int:
        """Tokens of prompt and output at which the sequence ends by length."""
        return self.num_prompt + self.request.max_tokens

    def append(self, token: int) -> None:
        """Add a token that arrived after the slot was lost."""
        self.tokens = np.append(self.tokens, np.int32(token))
