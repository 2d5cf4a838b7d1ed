"""A request of nobody, served before the first real one, which then finds nothing left to load."""

from __future__ import annotations

import numpy as np

from tokenspeed_core.engine.engine import Engine
from tokenspeed_core.messages import Ready
from tokenspeed_core.requests import Defaults, build_submit
from tokenspeed_core.sampling import SamplingParams

NUM_TOKENS = 256  # of the prompt, where as many fit


def rehearse(engine: Engine, max_model_len: int) -> None:
    """Serve a greedy request, and leave nothing of it behind."""
    num_new = min(2, max_model_len - 1)
    if not num_new:
        return  # a prompt would leave no room for a token
    prompt = np.zeros(min(NUM_TOKENS, max_model_len - num_new), np.int32)
    params, limits = SamplingParams(temperature=0, max_tokens=num_new), Ready(max_model_len, max_model_len, 1, "")
    refused = engine.submit(build_submit(0, params, prompt, limits, Defaults()))
    assert refused is None, refused
    while engine.has_work:
        engine.step()
    engine.reset_prefix_cache()
