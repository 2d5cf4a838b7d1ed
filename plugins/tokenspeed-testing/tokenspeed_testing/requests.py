"""Requests of the engine, for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tokenspeed_core.api.step import I32
from tokenspeed_core.engine.messages import Submit


def request(request_id: int, prompt: Sequence[int] | I32, **changes: Any) -> Submit:
    """Return a greedy request for one sequence of 8 tokens; `changes` replaces fields."""
    no_ids, no_values = np.zeros(0, np.int32), np.zeros(0, np.float32)
    fields: dict[str, Any] = {
        "n": 1,
        "max_tokens": 8,
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "seed": None,
        "logprobs": -1,
        "bias_ids": no_ids,
        "bias_values": no_values,
        "stop_token_ids": no_ids,
        "priority": 0,
        "cache_salt": "",
    }
    return Submit(request_id=request_id, prompt=np.asarray(prompt, np.int32), **(fields | changes))
