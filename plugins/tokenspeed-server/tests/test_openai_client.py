"""Chat completions through OpenAI's own client, with the fields that client libraries send."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from pydantic import BaseModel
from scripted import parsers, run, serving

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
OTHER = CALL.replace("Paris", "Rome")
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
USER: Any = {"role": "user", "content": "Weather in Paris?"}
ASK: Any = {"model": "fake", "messages": [USER]}
HEADER = "x-tokenspeed-ignored-fields"


def test_streamed_and_whole_tool_calls_are_equal() -> None:
    async def test() -> None:
        async with serving(f"Let me see.{CALL}{OTHER}") as (client, _):
            whole = (await client.chat.completions.create(**ASK, tools=[TOOL])).choices[0]
            calls = whole.message.tool_calls or []
            assert whole.finish_reason == "tool_calls"
            assert whole.message.content == "Let me see."
            async with client.chat.completions.stream(**ASK, tools=[TOOL]) as stream:
                last = (await stream.get_final_completion()).choices[0]
            again = last.message.tool_calls or []
            assert last.finish_reason == "tool_calls"
            for found in (calls, again):
                assert [json.loads(call.function.arguments) for call in found] == [
                    {"city": "Paris"},
                    {"city": "Rome"},
                ]
                assert len({call.id for call in found}) == 2

    run(test)


@pytest.mark.parametrize("stream", [False, True])
def test_parallel_calls_can_be_refused(stream: bool) -> None:
    async def test() -> None:
        async with serving(f"One.{CALL} and {OTHER} more") as (client, engine):
            ask = {**ASK, "tools": [TOOL], "parallel_tool_calls": False}
            if stream:
                async with client.chat.completions.stream(**ask) as events:
                    choice = (await events.get_final_completion()).choices[0]
                assert engine.aborted, "the rest of the reply was not generated"
            else:
                choice = (await client.chat.completions.create(**ask)).choices[0]
            (call,) = choice.message.tool_calls or ()
            assert json.loads(call.function.arguments) == {"city": "Paris"}
            assert choice.finish_reason == "tool_calls"

    run(test)


def test_conversation_with_a_call_continues() -> None:
    async def test() -> None:
        async with serving(CALL, "Sunny.") as (client, engine):
            first = await client.chat.completions.create(**ASK, tools=[TOOL])
            message = first.choices[0].message
            (call,) = message.tool_calls or ()
            result: Any = {"role": "tool", "tool_call_id": call.id, "content": "sun"}
            # As agents do: the message is sent back with all its fields.
            messages: Any = [USER, message.model_dump(), result]
            answer = await client.chat.completions.create(model="fake", messages=messages)
            assert answer.choices[0].message.content == "Sunny."
            sent = engine.messages()[1]["tool_calls"][0]["function"]
            assert sent == {"name": "get_weather", "arguments": {"city": "Paris"}}

    run(test)


def test_message_cut_by_max_tokens_is_taken_back() -> None:
    async def test() -> None:
        async with serving(CALL, "ok") as (client, engine):
            for max_tokens in range(1, 80, 3):
                engine.replies = [CALL, "ok"]
                first = await client.chat.completions.create(
                    **ASK, tools=[TOOL], max_tokens=max_tokens
                )
                messages: Any = [USER, first.choices[0].message.model_dump(), USER]
                answer = await client.chat.completions.create(
                    model="fake", messages=messages, tools=[TOOL]
                )
                assert answer.choices[0].message.content == "ok"

    run(test)


def test_fields_of_other_clients_are_ignored_and_named() -> None:
    async def test() -> None:
        async with serving("hello") as (client, engine):
            messages: Any = [
                {**USER, "id": "msg_1", "provider_specific_fields": {"x": 1}},
                {"role": "assistant", "content": "hi", "cache_control": {"type": "ephemeral"}},
                {"role": "user", "content": [
                    {"type": "text", "text": "go", "cache_control": {"type": "ephemeral"}}]},
            ]  # fmt: skip
            raw = await client.chat.completions.with_raw_response.create(
                model="fake",
                messages=messages,
                tools=[{**TOOL, "function": {**TOOL["function"], "strict": True}}],
                store=True,
                metadata={"run": "1"},
                service_tier="flex",
                reasoning_effort="low",
                prompt_cache_key="k",
                user="u",
                extra_body={"provider": {"order": ["a"]}},
            )
            assert raw.parse().choices[0].message.content == "hello"
            assert set(raw.headers[HEADER].split(", ")) == {
                "provider",
                "messages[].id",
                "messages[].provider_specific_fields",
                "messages[].cache_control",
                "messages[].content[].cache_control",
                "store",
                "service_tier",
            }
            assert "effort=low" in engine.prompt()
            assert engine.messages()[0] == USER
            assert "strict" not in engine.tools()[0]["function"]
            plain = await client.chat.completions.with_raw_response.create(**ASK)
            assert HEADER not in plain.headers
            async with client.chat.completions.with_streaming_response.create(
                **ASK, stream=True, extra_body={"route": "x"}
            ) as streamed:
                assert streamed.headers[HEADER] == "route"

    run(test)


def test_tools_without_a_parser_are_reported() -> None:
    async def test() -> None:
        async with serving(CALL, parsers=parsers(None, None)) as (client, _):
            raw = await client.chat.completions.with_raw_response.create(**ASK, tools=[TOOL])
            assert raw.headers[HEADER] == "tools"
            assert raw.parse().choices[0].message.content == CALL
            none = await client.chat.completions.with_raw_response.create(
                **ASK, tools=[TOOL], tool_choice="none"
            )
            assert HEADER not in none.headers

    run(test)


def test_unknown_fields_and_typos_are_client_errors() -> None:
    async def test() -> None:
        async with serving("x", unknown_fields="error") as (client, _):
            for field in ("provider", "temprature"):
                with pytest.raises(openai.BadRequestError) as caught:
                    await client.chat.completions.create(**ASK, extra_body={field: 1})
                assert (caught.value.param, caught.value.code) == (field, "unknown_field")

    run(test)


def test_every_event_can_have_the_usage() -> None:
    async def test() -> None:
        async with serving('a "usage":null}\n\n b') as (client, _):
            options: Any = {"include_usage": True, "continuous_usage_stats": True}
            stream = await client.chat.completions.create(
                **ASK, stream=True, stream_options=options
            )
            chunks = [chunk async for chunk in stream]
            counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage]
            assert len(counts) == len(chunks)
            assert counts == sorted(counts)
            assert chunks[-1].choices == []
            text = "".join(c.choices[0].delta.content or "" for c in chunks[:-1])
            assert text == 'a "usage":null}\n\n b'
            completions = await client.completions.create(
                model="fake", prompt="a", max_tokens=5, stream=True, stream_options=options
            )
            assert all([chunk.usage async for chunk in completions])

    run(test)


def test_min_tokens_reaches_the_engine() -> None:
    async def test() -> None:
        async with serving("x") as (client, engine):
            await client.chat.completions.create(**ASK, extra_body={"min_tokens": 7})
            assert engine.submitted[0].min_tokens == 7
            await client.completions.create(
                model="fake", prompt="a", n=2, best_of=2, extra_body={"min_tokens": 3}
            )
            assert (engine.submitted[1].n, engine.submitted[1].min_tokens) == (2, 3)

    run(test)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "alloy", "format": "wav"}}, "audio"),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"verbosity": "high"}, "verbosity"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"extra_body": {"best_of": 2}}, "best_of"),
        ({"extra_body": {"use_beam_search": True}}, "use_beam_search"),
        ({"extra_body": {"documents": [{"text": "x"}]}}, "documents"),
        ({"extra_body": {"chat_template": "x"}}, "chat_template"),
        ({"extra_body": {"bad_words": ["x"]}}, "bad_words"),
        ({"extra_body": {"truncate_prompt_tokens": 5}}, "truncate_prompt_tokens"),
        ({"extra_body": {"continue_final_message": True}}, "continue_final_message"),
        ({"extra_body": {"min_tokens": 5}, "max_tokens": 4}, "min_tokens"),
    ],
)
def test_fields_without_an_implementation_are_refused_by_name(
    fields: dict[str, Any], param: str
) -> None:
    async def test() -> None:
        async with serving("x") as (client, engine):
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(**ASK, **fields)
            assert caught.value.param == param
            assert not engine.submitted

    run(test)


def test_models_have_a_creation_time() -> None:
    async def test() -> None:
        async with serving("x", created=1_700_000_000) as (client, _):
            models = [model async for model in client.models.list()]
            assert [(model.id, model.created) for model in models] == [("fake", 1_700_000_000)]

    run(test)


class _Weather(BaseModel):
    """A tool as the client's helpers make it: strict, from a model."""

    city: str


def test_strict_tools_of_the_client_are_parsed() -> None:
    async def test() -> None:
        tool = openai.pydantic_function_tool(_Weather, name="get_weather")
        async with serving(CALL) as (client, _):
            parsed = await client.chat.completions.parse(**ASK, tools=[tool])
            (call,) = parsed.choices[0].message.tool_calls or ()
            assert call.function.parsed_arguments == _Weather(city="Paris")

    run(test)
