"""A request of nobody, served before the first real one, which then finds nothing left to load."""

from __future__ import annotations

import numpy as np

from tokenspeed_core.api.sampling import FinishReason, SamplingParams
from tokenspeed_core.engine.engine import Engine
from tokenspeed_core.engine.messages import Ready
from tokenspeed_core.engine.requests import Defaults, build_submit

REQUESTS = ((256, 0.0), (16, 1.0))  # tokens of the prompt, where as many fit, and temperature


def rehearse(engine: Engine, max_model_len: int) -> bool:
    """Serve a greedy request and one that draws, and leave nothing of them behind.

    Return whether either got finite logits: a kernel that never works raises nothing.
    """
    num_new, num_failed = min(2, max_model_len - 1), 0
    if not num_new:
        return True  # a prompt would leave no room for a token
    limits = Ready(max_model_len, max_model_len, 1, "")
    for request_id, (num_tokens, temperature) in enumerate(REQUESTS):
        prompt = np.zeros(min(num_tokens, max_model_len - num_new), np.int32)
        params = SamplingParams(temperature=temperature, max_tokens=num_new, seed=0)
        refused = engine.submit(build_submit(request_id, params, prompt, limits, Defaults()))
        assert refused is None, refused
        while engine.has_work:
            num_failed += sum(
                int((outputs.finish == FinishReason.ERROR).sum()) for outputs in engine.step()
            )
        engine.reset_prefix_cache()
    return num_failed < len(REQUESTS)
