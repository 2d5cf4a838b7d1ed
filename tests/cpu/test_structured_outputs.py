"""Structured output of the demo model, checked with jsonschema and re, whatever the logits are."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from tokenspeed_core import LLM, BadRequestError, SamplingParams
from tokenspeed_core.config import Config
from tokenspeed_core.engine.factory import resolve
from tokenspeed_core.errors import PluginError
from tokenspeed_core.plugins.catalog import Catalog

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", None]}, "maxItems": 3},
        "home": {"$ref": "#/$defs/place"},
    },
    "required": ["name", "age", "tags", "home"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["zip"],
            "additionalProperties": False,
        }
    },
}
SCHEMAS: list[dict[str, Any]] = [
    PERSON,
    {"anyOf": [{"type": "boolean"}, {"type": "array", "items": {"type": "number"}, "maxItems": 3}]},
    {"type": "string", "enum": ["north", "south"]},
    {"const": {"x": [1, None]}},
    {
        "type": "object",
        "properties": {"at": {"type": "string", "format": "date"}},
        "required": ["at"],
    },
]
REGEXES = [r"[0-9]{3}-[a-f]+", r"(yes|no)(, (yes|no)){2}", r"\w{2,4} \d\.\d", r"[^a-z\n]{1,9}!"]
PROMPT = "Describe Ann, who is 32, as JSON."


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(dtype="float32", max_num_seqs=8, max_total_tokens=4096) as made:
        yield made


def wild(seed: int, **changes: Any) -> SamplingParams:
    """Return parameters under which almost any allowed token is chosen."""
    fields: dict[str, Any] = {"temperature": 20.0, "seed": seed, "max_tokens": 150, "n": 2}
    return SamplingParams(**(fields | changes))


def finished(llm: LLM, all_params: list[SamplingParams]) -> list[list[str]]:
    """Return the texts that ended by themselves, for each request."""
    outputs = llm.generate([PROMPT] * len(all_params), all_params)
    return [
        [each.text or "" for each in output.outputs if each.finish_reason == "stop"]
        for output in outputs
    ]


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.release) for seed in (1, 2))]
)
def test_finished_output_validates_against_its_schema(llm: LLM, seed: int) -> None:
    asked = [wild(seed, structured_outputs={"json": schema}) for schema in SCHEMAS]
    num_finished = 0
    for schema, texts in zip(SCHEMAS, finished(llm, asked), strict=True):
        for text in texts:
            num_finished += 1
            jsonschema.validate(json.loads(text), schema)
    assert num_finished >= len(SCHEMAS)


def test_finished_output_matches_its_regex(llm: LLM) -> None:
    asked = [
        wild(seed, structured_outputs={"regex": regex}) for seed in (1, 2) for regex in REGEXES
    ]
    num_finished = 0
    for regex, texts in zip(REGEXES * 2, finished(llm, asked), strict=True):
        for text in texts:
            num_finished += 1
            assert re.fullmatch(regex, text), f"{text!r} does not match {regex}"
    assert num_finished >= len(REGEXES)


def test_choice_grammar_and_any_object_hold(llm: LLM) -> None:
    choices = ["red", "dark green", 'with "quotes"']
    grammar = 'root ::= item ("," item)*\nitem ::= "x" [0-9]+'
    asked = [
        wild(3, structured_outputs={"choice": choices}, n=4),
        wild(3, structured_outputs={"grammar": grammar}, n=4),
        wild(3, structured_outputs={"json_object": True}, n=4, logit_bias={}),
    ]
    chosen, listed, objects = finished(llm, asked)
    assert len(chosen) == 4
    assert set(chosen) <= set(choices)
    assert all(re.fullmatch(r"x\d+(,x\d+)*", text) for text in listed)
    assert all(isinstance(json.loads(text), dict) for text in objects)


def test_other_rows_of_a_batch_get_their_own_tokens(llm: LLM) -> None:
    rng = random.Random(5)
    prompts = [f"What is {rng.randint(10, 99)}+{rng.randint(10, 99)}?" for _ in range(10)]
    plain = [
        SamplingParams(temperature=rng.choice([0.0, 0.8]), seed=i, max_tokens=24) for i in range(10)
    ]
    alone = [
        llm.generate(p, each)[0].outputs[0].token_ids
        for p, each in zip(prompts, plain, strict=True)
    ]
    requests = [*zip(prompts, plain, strict=True)]
    structured = [
        (PROMPT, wild(i, structured_outputs={"json": SCHEMAS[i % len(SCHEMAS)]})) for i in range(6)
    ]
    mixed = [*requests, *structured]
    rng.shuffle(mixed)
    outputs = llm.generate([p for p, _ in mixed], [each for _, each in mixed])
    for (prompt, params), output in zip(mixed, outputs, strict=True):
        if params in plain:
            expected = alone[[*zip(prompts, plain, strict=True)].index((prompt, params))]
            assert output.outputs[0].token_ids == expected


def test_structured_output_with_logprobs_penalties_and_stop(llm: LLM) -> None:
    params = SamplingParams(
        structured_outputs={"regex": "[a-z]{5}STOP[0-9]+"},
        temperature=1,
        seed=1,
        logprobs=2,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        logit_bias={5: 2.0},
        stop="STOP",
        max_tokens=40,
    )
    (output,) = llm.generate(PROMPT, params)[0].outputs
    assert output.finish_reason == "stop"
    assert re.fullmatch("[a-z]{5}", output.text or "")
    assert output.logprobs is not None
    assert len(output.logprobs) == len(output.token_ids)


def test_min_tokens_yields_to_the_end_of_a_grammar(llm: LLM) -> None:
    common = {"temperature": 20.0, "seed": 3, "min_tokens": 12, "max_tokens": 40}
    short, long = (
        llm.generate(PROMPT, SamplingParams(structured_outputs={"regex": regex}, **common))[0]
        for regex in ("[ab]{3}", "[ab]+")
    )
    assert re.fullmatch("[ab]{3}", short.outputs[0].text or "")
    assert short.outputs[0].finish_reason == "stop"
    assert len(long.outputs[0].token_ids) >= 12


@pytest.mark.parametrize(
    "asked",
    [
        {"regex": "(a"},
        {"json": {"type": "nothing"}},
        {"grammar": "root ::= missing"},
        {"json": {"$ref": "http://127.0.0.1:9/schema.json"}},
    ],
)
def test_invalid_grammar_is_refused(llm: LLM, asked: dict[str, Any]) -> None:
    with pytest.raises(BadRequestError, match="grammar"):
        llm.generate(PROMPT, SamplingParams(structured_outputs=asked))


@pytest.mark.parametrize(
    "asked", [{}, {"regex": "a", "json_object": True}, {"json_object": False}, {"choice": []}]
)
def test_structured_outputs_needs_exactly_one_form(asked: dict[str, Any]) -> None:
    with pytest.raises(BadRequestError, match="structured_outputs"):
        SamplingParams(structured_outputs=asked)


def test_structured_output_refuses_ignore_eos(llm: LLM) -> None:
    with pytest.raises(BadRequestError, match="ignore_eos"):
        llm.generate(PROMPT, SamplingParams(structured_outputs={"regex": "a"}, ignore_eos=True))


def test_missing_backend_is_refused_with_a_hint() -> None:
    with (
        LLM(grammar_backend="none", max_total_tokens=512) as llm,
        pytest.raises(BadRequestError, match="grammar-backend"),
    ):
        llm.generate(PROMPT, SamplingParams(structured_outputs={"regex": "a"}))


def test_unknown_backend_ends_the_start_with_the_nearest() -> None:
    with pytest.raises(PluginError, match=r"--grammar-backend.*did you mean llguidance\?"):
        resolve(Config.from_keywords(grammar_backend="llguidanc"), Catalog.discover())
