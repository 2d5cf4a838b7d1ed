"""Structured output and forced tool calls: the grammars sent to the engine, and the answers."""

from __future__ import annotations

import json
from typing import Any

import openai
import pydantic
import pytest
from scripted import BAD_GRAMMAR, http, parsers, run, scripted, serving

from tokenspeed_core.api import CallGrammar
from tokenspeed_core.engine.messages import Grammar, Reasoning

USER: Any = [{"role": "user", "content": "Weather in Paris?"}]
ASK: Any = {"model": "fake", "messages": USER}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
THINKS = Reasoning("<think>", "</think>", False)


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, **more}}


TOOLS: Any = [tool("get_weather"), tool("get_time")]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


class Weather(pydantic.BaseModel):
    city: str
    degrees: int


def grammar_of(body: dict[str, Any], **options: Any) -> Grammar | None:
    """Return the grammar that the engine gets for a chat."""
    found: list[Grammar | None] = []

    async def test() -> None:
        async with serving("hello", **options) as (client, engine):
            await client.chat.completions.create(**ASK, extra_body=body)
            found.append(engine.submitted[0].grammar)

    run(test)
    return found[0]


def calls_of(body: dict[str, Any], **options: Any) -> tuple[CallGrammar, Reasoning | None]:
    grammar = grammar_of(body, **options)
    assert grammar is not None
    assert grammar.kind == "calls"
    return CallGrammar.read(grammar.text), grammar.reasoning


@pytest.mark.parametrize(
    ("body", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json", '{"type": "object"}'),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA},
                }
            },
            "json",
            json.dumps(SCHEMA),
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "strict": True},
                }
            },
            "json",
            '{"type": "object"}',
        ),
        ({"structured_outputs": {"json": SCHEMA}}, "json", json.dumps(SCHEMA)),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json", json.dumps(SCHEMA)),
        ({"structured_outputs": {"json_object": True}}, "json", '{"type": "object"}'),
        ({"structured_outputs": {"regex": "a+", "json": None}}, "regex", "a+"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", '["a", "b"]'),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "ebnf", 'root ::= "a"'),
        ({"guided_json": SCHEMA}, "json", json.dumps(SCHEMA)),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_choice": ["a"]}, "choice", '["a"]'),
        ({"guided_grammar": 'root ::= "a"'}, "ebnf", 'root ::= "a"'),
        ({"regex": "a+"}, "regex", "a+"),
        ({"ebnf": 'root ::= "a"'}, "ebnf", 'root ::= "a"'),
        ({"json_schema": json.dumps(SCHEMA)}, "json", json.dumps(SCHEMA)),
    ],
)
def test_every_form_of_structured_output_reaches_the_engine(
    body: dict[str, Any], kind: str, text: str
) -> None:
    assert grammar_of(body) == Grammar(kind, text, THINKS)  # type: ignore[arg-type]
    assert grammar_of(body, parsers=parsers(None, None)) == Grammar(kind, text)  # type: ignore[arg-type]


def test_free_replies_have_no_grammar() -> None:
    for body in ({}, {"response_format": {"type": "text"}}, {"tools": TOOLS}):
        assert grammar_of(body) is None


def test_completions_take_structured_output_too() -> None:
    async def test() -> None:
        async with serving() as (client, engine):
            await client.completions.create(
                model="fake", prompt="x", extra_body={"structured_outputs": {"regex": "a+"}}
            )
            assert engine.submitted[0].grammar == Grammar("regex", "a+")

    run(test)


@pytest.mark.parametrize(
    ("reasoning", "kwargs", "expected"),
    [
        ("qwen3", {}, THINKS),
        ("deepseek_r1", {}, Reasoning("<think>", "</think>", True)),
        (None, {}, None),
    ],
)
def test_grammar_starts_after_the_reasoning(
    reasoning: str | None, kwargs: dict[str, Any], expected: Reasoning | None
) -> None:
    grammar = grammar_of({"regex": "a", **kwargs}, parsers=parsers(reasoning, None))
    assert grammar == Grammar("regex", "a", expected)


@pytest.mark.parametrize(
    ("end", "expected"),
    [("<think>\n", Reasoning("<think>", "</think>", True)), ("<think>\n\n</think>\n\n", None)],
)
def test_prompt_decides_whether_reasoning_is_open(end: str, expected: Reasoning | None) -> None:
    from tokenspeed_server.api_body import validate
    from tokenspeed_server.protocol import ChatRequest
    from tokenspeed_server.reply_grammar import reply_grammar

    body = validate(ChatRequest, {**ASK, "regex": "a"})
    grammar = reply_grammar(body, parsers("qwen3", None), lambda: f"assistant\n{end}")
    assert grammar == Grammar("regex", "a", expected)


def test_pydantic_models_are_parsed_by_the_client() -> None:
    async def test() -> None:
        async with serving('{"city": "Paris", "degrees": 21}') as (client, engine):
            answer = await client.chat.completions.parse(**ASK, response_format=Weather)
            assert answer.choices[0].message.parsed == Weather(city="Paris", degrees=21)
            grammar = engine.submitted[0].grammar
            assert grammar is not None
            assert json.loads(grammar.text)["required"] == ["city", "degrees"]

    run(test)


@pytest.mark.parametrize(
    ("choice", "names", "is_parallel"),
    [
        ("required", ["get_weather", "get_time"], True),
        ({"type": "function", "function": {"name": "get_time"}}, ["get_time"], False),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "function", "function": {"name": "get_time"}}],
                },
            },
            ["get_time"],
            True,
        ),
    ],
)
def test_forced_calls_have_the_text_of_the_parser(
    choice: Any, names: list[str], is_parallel: bool
) -> None:
    grammar, reasoning = calls_of({"tools": TOOLS, "tool_choice": choice})
    assert [function.name for function in grammar.functions] == names
    assert grammar.functions[0].schema == SCHEMA
    assert (grammar.is_required, grammar.is_parallel) == (True, is_parallel)
    assert grammar.template.call_begin.startswith("<tool_call>")
    assert reasoning == THINKS


def test_parallel_calls_can_be_forbidden() -> None:
    grammar, _ = calls_of({"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False})
    assert not grammar.is_parallel


def test_forced_call_is_read_by_the_client() -> None:
    async def test() -> None:
        async with serving(CALL) as (client, engine):
            answer = await client.chat.completions.create(
                **ASK, tools=TOOLS, tool_choice="required"
            )
            (call,) = answer.choices[0].message.tool_calls or ()
            assert call.type == "function"
            assert (call.function.name, call.function.arguments) == (
                "get_weather",
                '{"city": "Paris"}',
            )
            assert answer.choices[0].finish_reason == "tool_calls"
            assert engine.tools() == TOOLS

    run(test)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("tool_parser", [None, "passthrough"])
def test_forced_calls_without_a_template_are_a_list(
    tool_parser: str | None, is_stream: bool
) -> None:
    reply = '[{"name": "get_weather", "parameters": {"city": "Paris"}}, {"name": "get_time", "parameters": {}}]'

    async def test() -> None:
        async with serving(reply, parsers=parsers(None, tool_parser)) as (client, engine):
            asked = {**ASK, "tools": TOOLS, "tool_choice": "required"}
            if is_stream:
                calls = []
                async for chunk in await client.chat.completions.create(**asked, stream=True):
                    for part in chunk.choices[0].delta.tool_calls or ():
                        if part.id:
                            calls.append([part.function.name, ""])
                        calls[part.index][1] += part.function.arguments
            else:
                answer = await client.chat.completions.create(**asked)
                assert not answer.choices[0].message.content
                calls = [
                    [call.function.name, call.function.arguments]
                    for call in answer.choices[0].message.tool_calls
                ]
            assert calls == [["get_weather", '{"city": "Paris"}'], ["get_time", "{}"]]
            grammar = engine.submitted[0].grammar
            assert grammar is not None
            assert CallGrammar.read(grammar.text).template.begin == "["

    run(test)


def test_strict_tools_constrain_optional_calls() -> None:
    tools = [tool("get_weather", strict=True), tool("get_time")]
    grammar, _ = calls_of({"tools": tools})
    assert not grammar.is_required
    assert [function.schema for function in grammar.functions] == [SCHEMA, {"type": "object"}]
    assert grammar_of({"tools": tools, "tool_choice": "none"}) is None


def test_strict_without_a_mark_is_named_as_ignored() -> None:
    async def test() -> None:
        async with serving(parsers=parsers(None, "json")) as (client, _):
            raw = await client.chat.completions.with_raw_response.create(
                **ASK, tools=[tool("f", strict=True)]
            )
            assert raw.headers["x-tokenspeed-ignored-fields"] == "tools[].function.strict"

    run(test)


def test_answer_schema_leaves_room_for_calls() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    grammar, _ = calls_of({"tools": TOOLS, "response_format": form})
    assert grammar.answer == SCHEMA
    assert grammar_of({"tools": TOOLS, "tool_choice": "none", "response_format": form}) == Grammar(
        "json", json.dumps(SCHEMA), THINKS
    )


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "response_format"),
        ({"regex": "a", "structured_outputs": {"regex": "b"}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a"] * 5000}, "guided_choice"),
        ({"regex": "a" * 600_000}, "regex"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice",
        ),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [tool('a"b')], "tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "regex": "a"}, "tool_choice"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_contradictions_are_refused_by_name(body: dict[str, Any], param: str) -> None:
    async def test() -> None:
        async with serving() as (client, _):
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(**ASK, extra_body=body)
            assert (caught.value.param or "").startswith(param), caught.value.body

    run(test)


BAD_SCHEMA = {"type": "string", "pattern": BAD_GRAMMAR}
BAD_FORMAT = {"type": "json_schema", "name": "x", "schema": BAD_SCHEMA}
BAD_TOOL = tool("f", parameters={"type": "object", "properties": {"x": BAD_SCHEMA}})


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {**ASK, "regex": BAD_GRAMMAR}, "regex"),
        ("/v1/completions", {"prompt": "x", "guided_json": BAD_SCHEMA}, "guided_json"),
        (
            "/v1/chat/completions",
            {**ASK, "response_format": {"type": "json_schema", "json_schema": BAD_FORMAT}},
            "response_format",
        ),
        ("/v1/chat/completions", {**ASK, "tools": [BAD_TOOL], "tool_choice": "required"}, "tools"),
        ("/v1/responses", {"input": "x", "text": {"format": BAD_FORMAT}}, "text.format"),
    ],
)
def test_refused_grammar_names_its_field(path: str, body: dict[str, Any], param: str) -> None:
    async def test() -> None:
        with scripted() as (app, _):
            async with http(app) as client:
                answer = await client.post(path, json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param

    run(test)
