"""Speculative decoding of the demo models: every drafter that is installed, with all sampling parameters."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
from draft_grammars import Unchecked
from drafted import draft_in_every_step
from score_answers import DRAFTERS
from tokenspeed_demo.items import held_out_set
from tokenspeed_demo.render import Renderer

from tokenspeed_core import LLM, RequestOutput, SamplingParams
from tokenspeed_core.engine.grammars import service
from tokenspeed_core.engine.outputs import Logprob
from tokenspeed_core.errors import ConfigError, PluginError

CODE = "def area(width, height):\n    return width * height\n"
COPY, SUM = (Renderer().prompt(*held_out_set(task, 1)) for task in ("copy", "sum_three_digits"))
# The models answer the first and the third with certainty. Penalties change the answers to the others.
PROMPTS = [COPY, CODE * 2, SUM, "1 2 3 4 5 6 1 2 3 4 5 6 1 2 3"]
SCHEMA = {
    "type": "object",
    "properties": {
        "names": {"type": "array", "items": {"enum": ["ann", "bob"]}, "maxItems": 9},
        "age": {"type": "integer"},
    },
    "required": ["names", "age"],
    "additionalProperties": False,
}
REGEX = "(ab|cd){3,9}x"
SPACE = 227  # the token " "
PARAMS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.9, "seed": 7, "n": 2},
    {"structured_outputs": {"json": SCHEMA}, "max_tokens": 60},
    {"temperature": 1.5, "seed": 3, "structured_outputs": {"regex": REGEX}, "logprobs": 2},
    {"repetition_penalty": 1.3, "logprobs": 1},
    {"stop": ["height", "carry"], "prompt_logprobs": 2},
    {"stop": ["th", "=", "e"], "include_stop_str_in_output": True, "min_tokens": 6, "logprobs": 2},
    {"stop_token_ids": [SPACE], "min_tokens": 7},
    {
        "stop_token_ids": [SPACE, 22],
        "min_tokens": 4,
        "ignore_eos": True,
        "temperature": 0.5,
        "seed": 1,
    },
    {"presence_penalty": 2.0, "frequency_penalty": 2.0, "prompt_logprobs": 2, "logprobs": 0},
    {"logit_bias": {8: 6.0, 30: -100.0}, "ignore_eos": True, "logprobs": 0},
    {
        "temperature": 1.0,
        "seed": 4,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.05,
        "n": 2,
        "logprobs": 3,
    },
)
ASKED = [
    (
        PROMPTS[i % len(PROMPTS)],
        SamplingParams(**{"temperature": 0, "max_tokens": 24, **each}),
    )
    for i, each in enumerate(PARAMS)
]
NEAR = 1e-3  # between log-probabilities: a step with more tokens may round differently


def answers(**settings: Any) -> tuple[list[RequestOutput], Any]:
    """Return the answers to all requests, and the engine's counters."""
    with LLM(
        device="cpu", dtype="float32", max_num_seqs=6, max_total_tokens=4096, **settings
    ) as llm:
        return llm.generate(*zip(*ASKED, strict=True), use_tqdm=False), llm.stats()


@pytest.fixture(scope="module", autouse=True)
def unchecked() -> Iterator[None]:
    """Let no subprocess try the grammars: each engine would start one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service, "Trial", lambda settings: Unchecked())
        yield


@pytest.fixture(scope="module")
def expected() -> Callable[[str], list[RequestOutput]]:
    """Return a function from a model to its answers without a drafter."""
    return cache(lambda model: answers(model=model)[0])


def values(entry: dict[int, Logprob] | None) -> list[float]:
    """Return the log-probabilities at a position, in ascending order."""
    return sorted(each.logprob for each in (entry or {}).values())


def check(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for (_, params), got, want in zip(ASKED, found, expected, strict=True):
        assert [(each.token_ids, each.text, each.finish_reason) for each in got.outputs] == [
            (each.token_ids, each.text, each.finish_reason) for each in want.outputs
        ], params
        columns = [(got.prompt_logprobs, want.prompt_logprobs)]
        columns += [
            (mine.logprobs, other.logprobs)
            for mine, other in zip(got.outputs, want.outputs, strict=True)
        ]
        for ours, others in columns:
            assert (ours is None) == (others is None)
            for entry, other in zip(ours or (), others or (), strict=True):
                assert values(entry) == pytest.approx(values(other), abs=NEAR), params


@pytest.mark.parametrize("drafter", list(DRAFTERS))
def test_drafter_changes_no_answer(
    drafter: str,
    expected: Callable[[str], list[RequestOutput]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draft_in_every_step(monkeypatch)
    model, config = DRAFTERS[drafter]
    found, stats = answers(model=model, speculative_config=config)
    check(found, expected(model))
    assert stats.num_saved_steps > 20
    assert 0 < stats.num_accepted[-1] < stats.num_accepted[0] < stats.num_draft_rows
    assert (stats.num_held_pages, stats.num_pending_pages) == (0, 0)


def test_answers_use_the_parameters(expected: Callable[[str], list[RequestOutput]]) -> None:
    """Equal answers with and without drafts show little if a parameter has no effect."""
    found = {
        (name, each.finish_reason)
        for (_, params), output in zip(ASKED, expected("demo"), strict=True)
        for each in output.outputs
        for name in params.model_fields_set
    }
    assert {(name, "stop") for name in ("stop", "stop_token_ids", "structured_outputs")} <= found
    for (_, params), output in zip(ASKED, expected("demo"), strict=True):
        if params.structured_outputs is None or output.outputs[0].finish_reason != "stop":
            continue
        text = output.outputs[0].text or ""
        if params.structured_outputs.regex is None:
            assert set(json.loads(text)) == {"names", "age"}
        else:
            assert re.fullmatch(REGEX, text)


@pytest.mark.parametrize(
    "drafter",
    [
        pytest.param(each, marks=() if each == "eagle3" else pytest.mark.release)
        for each in DRAFTERS
    ],
)
def test_processes_that_share_a_model_give_the_same_answers(
    drafter: str,
    expected: Callable[[str], list[RequestOutput]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draft_in_every_step(monkeypatch)
    model, config = DRAFTERS[drafter]
    found, stats = answers(
        model=model,
        speculative_config=config,
        tensor_parallel_size=2,
        enable_allreduce_fusion=drafter == "mtp",
    )
    check(found, expected(model))
    assert stats.num_saved_steps > 20


def test_wrong_drafters_are_refused() -> None:
    with pytest.raises(PluginError, match=r"suffixx.*suffix"):
        LLM(speculative_algorithm="suffixx")
    with pytest.raises(ConfigError, match=r"prompt_lookup_maxx.*prompt_lookup_max"):
        LLM(speculative_config={"method": "ngram", "prompt_lookup_maxx": 3})
    with pytest.raises(ConfigError, match=r"method is missing.*eagle3.*ngram"):
        LLM(speculative_config={"model": "demo-eagle3"})
