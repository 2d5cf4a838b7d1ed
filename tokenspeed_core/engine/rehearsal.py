"""A request of nobody, served before the first real one, which then finds nothing left to load."""

from __future__ import annotations

import numpy as np

from tokenspeed_core.engine.engine import Engine
from tokenspeed_core.messages import Submit

NUM_TOKENS = 256  # of the prompt, where as many fit


def rehearse(engine: Engine, max_model_len: int) -> None:
    """Serve a greedy request, and leave nothing of it behind."""
    num_new = min(2, max_model_len - 1)
    if not num_new:
        return  # a prompt would leave no room for a token
    prompt, none = np.zeros(min(NUM_TOKENS, max_model_len - num_new), np.int32), np.zeros(0, np.int32)
    refused = engine.submit(Submit(
        request_id=0, prompt=prompt, n=1, max_tokens=num_new, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0,
        presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0, seed=0, logprobs=-1, bias_ids=none,
        bias_values=np.zeros(0, np.float32), stop_token_ids=none, priority=0, cache_salt="",
    ))
    assert refused is None, refused
    while engine.has_work:
        engine.step()
    engine.reset_prefix_cache()
