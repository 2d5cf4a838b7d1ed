"""Grammars and draft tokens: a mask for each of them, and the same outputs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from draft_grammars import BACKENDS
from drafted import Guesser, make_engine
from tokenspeed_testing.grammar import SCHEMA, TOKENS, VOCABULARY

from tokenspeed_core import LLM, RequestOutput, SamplingParams
from tokenspeed_core.api.grammars import GrammarSpec
from tokenspeed_core.engine.engine import Engine
from tokenspeed_core.engine.grammars import Grammars
from tokenspeed_core.engine.grammars.sequence import ReasoningTokens, SequenceGrammar
from tokenspeed_core.engine.messages import Reasoning
from tokenspeed_core.plugins.catalog import Catalog

NUM_WORDS = -(-len(TOKENS) // 32)
OBJECT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def allowed(row: np.ndarray[Any, np.dtype[np.int32]]) -> list[int]:
    """Return the tokens of a mask."""
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")[: len(TOKENS)]
    return [int(i) for i in np.flatnonzero(bits)]


@pytest.mark.parametrize("has_reasoning", [False, True])
@pytest.mark.parametrize("name", BACKENDS)
def test_masks_of_drafts_equal_those_of_output(name: str, has_reasoning: bool) -> None:
    catalog = Catalog.discover()
    compiler = catalog.need(catalog.get("grammars", name), GrammarSpec).make(VOCABULARY)
    compiled = compiler.compile("json", json.dumps(SCHEMA))
    marks = Reasoning("<think>", "</think>", True) if has_reasoning else None
    reasoning = None if marks is None else ReasoningTokens(marks, VOCABULARY)
    random = np.random.default_rng(5)
    for min_tokens in (0, 4):
        stops = np.asarray(VOCABULARY.eos_ids, np.int32)

        def make(least: int = min_tokens, stops: Any = stops) -> SequenceGrammar:
            return SequenceGrammar(compiled, reasoning, min_tokens=least, stop_ids=stops)

        one, other = make(), make()
        forced = [*b"so </think>"] if has_reasoning else []
        row, text = np.zeros((1, NUM_WORDS), np.int32), []
        while len(text) < 60:
            # `ahead` gives the right tokens, and the mask before each of them.
            drafts, masks = [], []
            ahead = make()
            ahead.read(text)
            for i in range(4):
                ahead.fill(row[0])
                masks.append(row[0].copy())
                at = len(text) + i
                choice = forced[at] if at < len(forced) else int(random.choice(allowed(row[0])))
                drafts.append(choice)
                ahead.read([choice])
                if ahead.matcher.is_terminated:
                    break
            num_right = len(drafts)
            if random.random() < 0.5:
                num_right = int(random.integers(num_right))
                wrong = set(range(len(TOKENS))) - set(allowed(masks[num_right]))
                drafts[num_right] = min(wrong)
            found = np.zeros((1 + len(drafts), NUM_WORDS), np.int32)
            one.fill_drafts(drafts, found)
            for mask, expected in zip(found[: num_right + 1], masks, strict=False):
                assert np.array_equal(mask, expected)
            assert not one.has_failed
            # Only the first draft token becomes output, or another token.
            other.fill(row[0])
            assert np.array_equal(row[0], found[0])
            if num_right == 0:
                continue
            for each in (one, other):
                each.read(drafts[:1])
            text.append(drafts[0])
            if one.matcher.is_terminated:
                break
        assert not other.has_failed


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(
        dtype="float32",
        max_num_seqs=4,
        max_total_tokens=4096,
        speculative_algorithm="ngram",
        speculative_num_draft_tokens=5,
    ) as made:
        yield made


def test_drafts_change_no_structured_output(llm: LLM) -> None:
    asked = [
        SamplingParams(temperature=0, max_tokens=60, structured_outputs={"json": OBJECT}),
        SamplingParams(
            temperature=5.0, seed=3, max_tokens=60, structured_outputs={"regex": "[a-z]{2,9}=[0-9]"}
        ),
        SamplingParams(temperature=1.0, seed=4, max_tokens=40),
    ]
    prompts = ["Describe Ann, who is 32, as JSON.", "A word and a digit: ", "Repeat: red green"]
    before = llm._engine
    runner: Any = before.runner
    grammars = before._grammars
    assert grammars is not None

    def generate(drafter: Guesser | None) -> tuple[list[RequestOutput], Engine]:
        made = make_engine(runner, drafter, max_drafts=4 if drafter else 0)
        llm._engine = Engine(
            made.scheduler, runner, depth=1, grammars=Grammars(made.scheduler, grammars._backend)
        )
        try:
            return llm.generate(prompts, asked), made
        finally:
            llm._engine = before

    expected, plain = generate(None)
    assert not plain.scheduler.counters.snapshot(plain.scheduler.kv, 0).num_draft_tokens
    drafter = Guesser(runner.resolved.limits.vocab_size, wrong=0.1)
    drafter.known = [
        [*output.prompt_token_ids, *output.outputs[0].token_ids] for output in expected
    ]
    found, made = generate(drafter)
    assert [each.outputs[0].token_ids for each in found] == [
        each.outputs[0].token_ids for each in expected
    ]
    assert re.fullmatch("[a-z]{2,9}=[0-9]", found[1].outputs[0].text or "")
    stats = made.scheduler.counters.snapshot(made.scheduler.kv, 0)
    assert stats.num_saved_steps > 20
