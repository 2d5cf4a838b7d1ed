"""Answers of the demo models to their score set, with and without drafters."""

from __future__ import annotations

from typing import Any

import pytest
from drafted import draft_in_every_step
from tokenizers import Tokenizer
from tokenspeed_demo.items import REQUIRED, held_out_set
from tokenspeed_demo.render import TEMPLATE, Renderer
from tokenspeed_demo.score import MAX_TOKENS

from tokenspeed_core import LLM, SamplingParams

# The model and the settings of each drafter.
DRAFTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "ngram": ("demo", {"method": "ngram", "num_speculative_tokens": 5}),
    "suffix": ("demo", {"method": "suffix", "num_speculative_tokens": 8}),
    "eagle3": ("demo", {"method": "eagle3", "model": "demo-eagle3", "num_speculative_tokens": 5}),
    "draft_model": (
        "demo",
        {"method": "draft_model", "model": "demo-deepseek", "num_speculative_tokens": 2},
    ),
    "mtp": ("demo-deepseek", {"method": "mtp", "num_speculative_tokens": 3}),
}


def answers(
    model: str, num_items: int, patch: pytest.MonkeyPatch, **settings: Any
) -> tuple[list[list[int]], Any]:
    """Return the tokens of the greedy answers to the first items of each task, and the engine's counters.

    Each row verifies as many draft tokens as it may.
    """
    draft_in_every_step(patch)
    tokenizer, renderer = Tokenizer.from_file(str(TEMPLATE.parent / "tokenizer.json")), Renderer()
    prompts = [
        {"prompt_token_ids": tokenizer.encode(renderer.prompt(item), add_special_tokens=False).ids}
        for task in REQUIRED
        for item in held_out_set(task, num_items)
    ]
    sampling = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    with LLM(model=model, dtype="float32", max_total_tokens=65536, **settings) as llm:
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        return [list(each.outputs[0].token_ids) for each in outputs], llm.stats()
