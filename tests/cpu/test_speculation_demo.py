"""Speculative decoding of the demo model: the drafters that are installed, and structured output."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from tokenspeed_testing.drafts import FixedDepth

from tokenspeed_core import LLM, SamplingParams
from tokenspeed_core.errors import ConfigError, PluginError

CODE = "def area(width, height):\n    return width * height\n"
PROMPTS = [
    f"Copy this text:\n{CODE * 3}",
    f"{CODE}{CODE}",
    "What is 23 + 45?",
    "1 2 3 4 5 6 1 2 3 4 5 6 1 2 3",
]
SCHEMA = {
    "type": "object",
    "properties": {
        "names": {"type": "array", "items": {"enum": ["ann", "bob"]}, "maxItems": 9},
        "age": {"type": "integer"},
    },
    "required": ["names", "age"],
    "additionalProperties": False,
}
PARAMS = [
    SamplingParams(temperature=0, max_tokens=48),
    SamplingParams(temperature=0.9, seed=7, max_tokens=48, n=2),
    SamplingParams(temperature=0, max_tokens=60, structured_outputs={"json": SCHEMA}),
    SamplingParams(
        temperature=1.5, seed=3, max_tokens=60, structured_outputs={"regex": "(ab|cd){3,9}x"}
    ),
    SamplingParams(temperature=0, max_tokens=40, repetition_penalty=1.2, logprobs=1),
    SamplingParams(temperature=0, max_tokens=40, stop=["return"]),
]


def answers(llm: LLM) -> list[list[tuple[list[int], str | None, str]]]:
    prompts = [prompt for prompt in PROMPTS for _ in PARAMS]
    outputs = llm.generate(prompts, PARAMS * len(PROMPTS), use_tqdm=False)
    return [
        [(list(each.token_ids), each.finish_reason, each.text or "") for each in output.outputs]
        for output in outputs
    ]


def make(**settings: object) -> LLM:
    return LLM(dtype="float32", max_num_seqs=6, max_total_tokens=4096, **settings)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def expected() -> Iterator[list[list[tuple[list[int], str | None, str]]]]:
    with make() as llm:
        yield answers(llm)


@pytest.mark.parametrize("drafter", ["ngram", "suffix"])
def test_drafter_changes_no_answer(
    drafter: str,
    expected: list[list[tuple[list[int], str | None, str]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Otherwise drafting pauses in most of these steps.
    monkeypatch.setattr(
        "tokenspeed_core.engine.drafting.AdaptiveDepth", lambda num_seqs, most: FixedDepth(most)
    )
    with make(speculative_algorithm=drafter, speculative_num_draft_tokens=6) as llm:
        found = answers(llm)
        stats = llm.stats()
    for i, (want, got) in enumerate(zip(expected, found, strict=True)):
        assert got == want, (i // len(PARAMS), PARAMS[i % len(PARAMS)])
    for output in found[2 :: len(PARAMS)]:
        if output[0][1] == "stop":
            assert set(json.loads(output[0][2])) == {"names", "age"}
    assert stats.num_saved_steps > 20


def test_wrong_drafters_are_refused() -> None:
    with pytest.raises(PluginError, match=r"suffixx.*suffix"):
        make(speculative_algorithm="suffixx")
    with pytest.raises(ConfigError, match=r"prompt_lookup_maxx.*prompt_lookup_max"):
        make(speculative_config={"method": "ngram", "prompt_lookup_maxx": 3})
    with pytest.raises(ConfigError, match=r"method is missing.*eagle3.*ngram"):
        make(speculative_config={"model": "demo-eagle3"})
