"""Compares an engine with transformers' model of the same tiny checkpoint, on any device."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_families import save_reference

from tokenspeed_core import LLM, SamplingParams

NEAR = 1e-4  # logits this close are equal: either token is right
LENGTHS = (1, 2, 4, 7, 8, 15, 16, 17, 33, 60)


class Family:
    """A checkpoint on disk, and the logits of transformers' model of it, in float32 on the CPU."""

    def __init__(self, name: str, folder: Path) -> None:
        self.folder = folder
        model = save_reference(name, folder)

        @cache
        def logits(tokens: tuple[int, ...]) -> torch.Tensor:
            with torch.inference_mode():
                found: torch.Tensor = model(torch.tensor([tokens])).logits[0]
            return found

        self.logits = logits

    def start(self, depth: int = 1, **settings: Any) -> LLM:
        """Start an engine with `depth` steps in flight; a GPU has 2."""
        defaults: dict[str, Any] = {
            "skip_tokenizer_init": True,
            "max_total_tokens": 1024,
            "block_size": 4,
            "max_num_seqs": 8,
        }
        llm = LLM(str(self.folder), **{**defaults, **settings})
        llm._engine._depth = depth
        return llm

    def check_greedy(self, prompt: list[int], tokens: list[int]) -> None:
        """Raise AssertionError if transformers finds another token more probable."""
        logits = self.logits((*prompt, *tokens))
        for at, token in enumerate(tokens, len(prompt) - 1):
            assert logits[at].max() - logits[at, token] <= NEAR, (
                f"token {at + 1 - len(prompt)} after {len(prompt)}"
            )


def prompts() -> list[list[int]]:
    """Return prompts of many lengths; some share a long beginning."""
    random = np.random.default_rng(3)
    shared = random.integers(3, 101, 60).tolist()
    return [
        shared[:length] if i % 2 else random.integers(3, 101, length).tolist()
        for i, length in enumerate(LENGTHS)
    ]


def greedy(num_tokens: int, **params: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, **params)


def check_engine(model: Family, device: str, depth: int) -> None:
    """Compare tokens and log-probabilities of one engine with transformers, in float32.

    Prompts are computed in chunks of 16, in a pool so small that sequences are preempted. The second run finds cached
    prefixes.
    """
    wanted, num_tokens = [[i] for i in range(60, 64)] + prompts(), 12
    # Some sequences have no log-probabilities, which is another path.
    params = [greedy(num_tokens, logprobs=1 if i % 4 == 1 else None) for i in range(len(wanted))]
    settings: dict[str, Any] = {
        "device": device,
        "dtype": "float32",
        "chunked_prefill_size": 16,
        "max_total_tokens": 112,
        "max_model_len": 96,
        "max_num_seqs": 16,
    }
    with model.start(depth, **settings) as llm:
        for _ in range(2):
            outputs = llm.generate([{"prompt_token_ids": ids} for ids in wanted], params)
            for prompt, output in zip(wanted, outputs, strict=True):
                tokens, entries = output.outputs[0].token_ids, output.outputs[0].logprobs
                assert len(tokens) == num_tokens
                model.check_greedy(prompt, tokens)
                expected = model.logits((*prompt, *tokens)).log_softmax(-1)[len(prompt) - 1 :]
                for at, entry in enumerate(entries or ()):
                    assert {key: each.logprob for key, each in entry.items()} == pytest.approx(
                        {key: float(expected[at, key]) for key in entry}, abs=NEAR
                    )
        assert any(output.num_cached_tokens for output in outputs), "no prefix was cached"
        scheduler = llm._engine.scheduler
        assert scheduler.num_preemptions > 0, "the pool was too large for this test"
        pool = scheduler.kv.pool
        assert pool.num_available == pool.num_pages, "pages are held when idle"
