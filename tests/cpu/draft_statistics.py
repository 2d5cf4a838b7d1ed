"""Whether sampled tokens follow the distribution of the model, and a fault in the verification that changes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from drafted import finish, make_engine
from tokenspeed_testing.requests import request

from tokenspeed_core.engine.engine import Engine
from tokenspeed_core.worker.local import LocalRunner

PROMPT = [5, 6, 7]
NUM_COUNTED = 3  # the first tokens of each request
MAX_TOKENS = 4  # so that the first step after the prompt may verify two draft tokens


def chi_square(engine: Engine, expected: dict[tuple[int, ...], float], **sampling: Any) -> float:
    """Return the statistic of sampled tokens, as a multiple of a limit that 1 of 1,000 correct engines exceeds.

    `expected` are the counts by the first tokens of a request. Rare ones are counted together.
    """
    num = round(sum(expected.values()))
    for i in range(num):
        engine.submit(request(i, PROMPT, max_tokens=MAX_TOKENS, seed=i, **sampling))
    replies = finish(engine, []).values()
    counts = Counter(tuple(each.token_ids[:NUM_COUNTED]) for each in replies)
    assert set(counts) <= set(expected), "all tokens are possible"
    common = [key for key, value in expected.items() if value >= 5]
    assert len(common) >= 10
    cells = [(counts[key], expected[key]) for key in common]
    rest = num - sum(value for _, value in cells)
    assert rest < 0.1 * num
    if rest >= 5:
        cells.append((num - sum(count for count, _ in cells), rest))
    freedom = len(cells) - 1
    statistic = sum((count - value) ** 2 / value for count, value in cells)
    return statistic / (freedom + 3.1 * (2 * freedom) ** 0.5 + 5)


def expected_counts(
    runner: LocalRunner, num_requests: int, vocab_size: int, **sampling: Any
) -> dict[tuple[int, ...], float]:
    """Return how many requests are expected to have each possible start, by the model's log-probabilities.

    `sampling` has a temperature, a top_k, and possibly biases.
    """
    expected: dict[tuple[int, ...], float] = {(): float(num_requests)}
    for _ in range(NUM_COUNTED):
        starts = list(expected)
        wanted = [
            request(i, [*PROMPT, *start], max_tokens=1, logprobs=vocab_size)
            for i, start in enumerate(starts)
        ]
        replies = finish(make_engine(runner), wanted)
        longer: dict[tuple[int, ...], float] = {}
        for i, start in enumerate(starts):
            logits = np.zeros(vocab_size)
            logits[replies[i].logprobs[0][1:]] = replies[i].values[1:]
            logits[sampling.get("bias_ids", [])] += sampling.get("bias_values", [])
            top = np.argsort(-logits)[: sampling["top_k"]]
            weights = np.exp((logits[top] - logits[top[0]]) / sampling["temperature"])
            for token, share in zip(top.tolist(), weights / weights.sum(), strict=True):
                longer[*start, token] = expected[start] * share
        expected = longer
    return expected


def accept_by_force(runner: LocalRunner, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a runner accept a share of all draft tokens, whatever tokens it samples."""
    assembly, random = runner._assembly, np.random.default_rng(0)
    verify: Callable[..., None] = assembly.kernels.verify

    def accept(ids: Any, token_ids: Any, tokens: Any, first: Any, num: Any, *rest: Any) -> None:
        for start, count in zip(first.tolist(), num.tolist(), strict=True):
            for place in range(start, start + count):
                if random.random() < share:
                    ids[place] = token_ids[tokens[place] + 1].to(torch.int32)
        verify(ids, token_ids, tokens, first, num, *rest)

    # An engine on an emptied runner has a new sampler, with these kernels.
    kernels = replace(assembly.kernels, verify=accept)
    monkeypatch.setattr(runner, "_assembly", replace(assembly, kernels=kernels))
