"""Serves two requests before the first real one, so that everything is loaded and compiled."""

from __future__ import annotations

import numpy as np

from tokenspeed_core.api.sampling import FinishReason, SamplingParams
from tokenspeed_core.engine.engine import Engine
from tokenspeed_core.engine.inputs import InputProcessor, ModelText
from tokenspeed_core.engine.messages import Ready

MAX_OUTPUT_TOKENS = 2
PROMPTS = ((256, 0.0), (16, 1.0))  # maximum prompt tokens, and temperature


def warm_up(engine: Engine) -> bool:
    """Serve a greedy and a sampled request, and reset the prefix cache.

    Returns whether any of them got finite logits: a kernel that computes garbage raises no error.
    """
    max_model_len = engine.scheduler.limits.max_model_len
    max_tokens = min(MAX_OUTPUT_TOKENS, max_model_len - 1)
    if max_tokens < 1:
        return True  # a prompt would leave no room for a token
    inputs = InputProcessor(ModelText(None, None), Ready(max_model_len, max_model_len, 1, ""))
    num_failed = 0
    for request_id, (num_tokens, temperature) in enumerate(PROMPTS):
        prompt = np.zeros(min(num_tokens, max_model_len - max_tokens), np.int32)
        params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=0)
        rejected = engine.submit(inputs.request(request_id, params, prompt))
        assert rejected is None, rejected
        while engine.has_work:
            for outputs in engine.step():
                num_failed += int((outputs.finish == FinishReason.ERROR).sum())
        engine.reset_prefix_cache()
    return num_failed < len(PROMPTS)
