"""Requests of every kind that speculation must not change, and the comparison of their replies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from drafted import Reply, finish, make_engine
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from tokenspeed_testing.requests import request

from tokenspeed_core.engine.messages import Submit
from tokenspeed_core.worker.local import LocalRunner

VOCAB = 97
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 1.0, "seed": 4, "top_k": 20, "top_p": 0.9, "n": 2},
    {"presence_penalty": 1.5, "frequency_penalty": 0.7},
    {"repetition_penalty": 1.6, "temperature": 0.5, "seed": 5},
    {"min_tokens": 7, "stop_token_ids": np.arange(0, VOCAB, 2, dtype=np.int32)},
    {"stop_token_ids": np.arange(0, 20, dtype=np.int32)},
    {"logprobs": 3},
    {"logprobs": 0, "temperature": 1.2, "seed": 6, "frequency_penalty": 0.5},
    {"prompt_logprobs": 2, "logprobs": 1},
    {
        "bias_ids": np.asarray([5, 9], np.int32),
        "bias_values": np.asarray([4.0, -8.0], np.float32),
    },
)


def requests(seed: int = 0) -> list[Submit]:
    """Return two requests of each kind, some of which share a long prefix."""
    random = np.random.default_rng(seed)
    shared, made, number = random.integers(0, VOCAB, 40).tolist(), [], 0
    for i, kind in enumerate((*KINDS, *KINDS)):
        tail = random.integers(0, VOCAB, int(random.integers(1, 12))).tolist()
        prompt = (shared if i % 3 else []) + tail
        made.append(request(number, prompt, **{"max_tokens": 3 + 5 * i % 17, **kind}))
        number += kind.get("n", 1)
    return made


def known(expected: dict[int, Reply]) -> list[list[int]]:
    """Return the prompts and outputs of all sequences."""
    return [
        [*submit.prompt.tolist(), *expected[submit.request_id + i].token_ids]
        for submit in requests()
        for i in range(submit.n)
    ]


def check(found: dict[int, Reply], expected: dict[int, Reply]) -> None:
    for number, reply in expected.items():
        got = found[number]
        assert (got.token_ids, got.finish) == (reply.token_ids, reply.finish), number
        assert got.logprobs == reply.logprobs
        assert np.allclose(got.values, reply.values, atol=1e-3)
        assert got.prompt_logprobs == reply.prompt_logprobs
        assert np.allclose(got.prompt_values, reply.prompt_values, atol=1e-3)


def few_examples(num_examples: int) -> settings:
    """Return settings of hypothesis for the same few examples in each run. Each of them runs an engine."""
    return settings(
        max_examples=num_examples,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )


def engine_settings(
    max_drafts: int, chunk_sizes: Sequence[int], num_pages: int
) -> st.SearchStrategy[dict[str, Any]]:
    """Return a strategy for the settings of `make_engine`, and of `finish` that preempts."""
    return st.fixed_dictionaries(
        {
            "max_drafts": st.integers(1, max_drafts),
            "chunk_size": st.sampled_from(chunk_sizes),
            "num_pages": st.sampled_from([num_pages, None]),
            "depth": st.integers(1, 2),
            "caching": st.booleans(),
            "preempt_every": st.sampled_from([0, 7]),
        }
    )


def check_with_settings(
    runner: LocalRunner,
    made: Sequence[Submit],
    expected: dict[int, Reply],
    chosen: Mapping[str, Any],
    min_accepted: float,
) -> None:
    """Check replies with the draft model of a runner, and settings of `engine_settings`.

    All blocks are free in the end. At least this share of the rows accepts the first draft token.
    """
    given = dict(chosen)
    preempt_every = given.pop("preempt_every")
    engine = make_engine(runner, max_prefill_tokens=256, **given)
    check(finish(engine, made, preempt_every=preempt_every), expected)
    pool, stats = engine.scheduler.kv.pool, engine.stats()
    assert pool.num_available == pool.num_pages
    assert stats.num_accepted[0] > min_accepted * stats.num_draft_rows
