"""The Messages API, through Anthropic's own client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from scripted import ScriptedEngine, http, leave_early, run, scripted

if TYPE_CHECKING:  # Each pytest process would spend two seconds on this import.
    import anthropic

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TOOLS: Any = [
    {
        "name": "get_weather",
        "description": "Weather of a city",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
        "cache_control": {"type": "ephemeral"},
    }
]
ASK: Any = {
    "model": "fake",
    "max_tokens": 2000,
    "messages": [{"role": "user", "content": "Weather in Paris?"}],
}


@asynccontextmanager
async def serving(
    *replies: str, **options: Any
) -> AsyncIterator[tuple[anthropic.AsyncAnthropic, ScriptedEngine]]:
    import anthropic

    with scripted(*replies, **options) as (app, engine):
        async with anthropic.AsyncAnthropic(
            api_key="secret", base_url="http://test", http_client=http(app), max_retries=0
        ) as client:
            yield client, engine


def test_message_has_text_usage_and_stop_reason() -> None:
    async def test() -> None:
        async with serving("Sunny.") as (client, engine):
            answer = await client.messages.create(
                **ASK, system="Be short.", extra_body={"temperature": 0, "top_k": 5}
            )
            assert answer.content[0].type == "text"
            assert answer.content[0].text == "Sunny."
            assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
            assert (answer.role, answer.model, answer.id[:4]) == ("assistant", "fake", "msg_")
            submit = engine.submitted[0]
            assert answer.usage.input_tokens == 1, "the engine cached all tokens but one"
            assert answer.usage.cache_read_input_tokens == len(submit.prompt) - 1
            assert answer.usage.output_tokens > 1
            assert (submit.temperature, submit.top_k, submit.max_tokens) == (0, 5, 2000)
            assert engine.messages() == [
                {"role": "system", "content": "Be short."},
                {"role": "user", "content": "Weather in Paris?"},
            ]

    run(test)


def test_streamed_text_events_match_the_client() -> None:
    async def test() -> None:
        async with serving("It is sunny, é 🙂.") as (client, _):
            whole = await client.messages.create(**ASK)
            async with client.messages.stream(**ASK) as stream:
                texts = [text async for text in stream.text_stream]
                final = await stream.get_final_message()
            assert len(texts) > 5
            assert "".join(texts) == "It is sunny, é 🙂."
            assert [block.to_dict() for block in whole.content] == [
                {"type": "text", "text": "It is sunny, é 🙂."}
            ]
            assert final.usage.output_tokens == whole.usage.output_tokens
            assert final.usage.cache_read_input_tokens == whole.usage.cache_read_input_tokens
            assert final.stop_reason == "end_turn"

    run(test)


def test_raw_events_follow_the_published_sequence() -> None:
    async def test() -> None:
        async with serving(f"<think>\nHm.\n</think>\n\nLet me look.{CALL}") as (client, _):
            events = [
                event
                async for event in await client.messages.create(**ASK, tools=TOOLS, stream=True)
            ]
            kinds = [event.type for event in events]
            assert kinds[0] == "message_start"
            assert kinds[-2:] == ["message_delta", "message_stop"]
            starts = [e.content_block.type for e in events if e.type == "content_block_start"]
            assert starts[0] == "thinking"
            assert starts[-1] == "tool_use"
            indices = [e.index for e in events if e.type == "content_block_start"]
            assert indices == list(range(len(starts)))
            assert [e.index for e in events if e.type == "content_block_stop"] == indices
            open_block = -1
            for event in events:
                if event.type == "content_block_start":
                    open_block = event.index
                elif event.type == "content_block_delta":
                    assert event.index == open_block

    run(test)


def test_thinking_and_tool_use_are_separate_blocks() -> None:
    async def test() -> None:
        reply = f"<think>\nI need the weather.\n</think>\n\n{CALL}\n{CALL}"
        async with serving(reply) as (client, engine):
            whole = await client.messages.create(**ASK, tools=TOOLS)
            async with client.messages.stream(**ASK, tools=TOOLS) as stream:
                partial = [e.partial_json async for e in stream if e.type == "input_json"]
                streamed = await stream.get_final_message()
            for answer in (whole, streamed):
                thinking = answer.content[0]
                assert thinking.type == "thinking"
                assert thinking.thinking.strip() == "I need the weather."
                assert thinking.signature
                calls = [block for block in answer.content if block.type == "tool_use"]
                assert [call.name for call in calls] == ["get_weather"] * 2
                assert [call.input for call in calls] == [{"city": "Paris"}] * 2
                assert len({call.id for call in calls}) == 2
                assert answer.stop_reason == "tool_use"
            assert json.loads("".join(partial)[: len("".join(partial)) // 2]) == {"city": "Paris"}
            function = engine.tools()[0]["function"]
            assert function == {
                "name": "get_weather",
                "description": "Weather of a city",
                "parameters": TOOLS[0]["input_schema"],
            }

    run(test)


def test_tool_round_trip_reaches_the_template() -> None:
    async def test() -> None:
        reply = f"<think>\nHm.\n</think>\n\nLet me look.\n{CALL}"
        async with serving(reply, "Sunny.") as (client, engine):
            first = await client.messages.create(**ASK, tools=TOOLS)
            call = next(block for block in first.content if block.type == "tool_use")
            results: Any = [
                {"type": "tool_result", "tool_use_id": call.id, "content": "20 degrees"},
                {
                    "type": "tool_result",
                    "tool_use_id": call.id,
                    "is_error": True,
                    "content": [{"type": "text", "text": "broken"}],
                },
                {"type": "text", "text": "And now?", "cache_control": {"type": "ephemeral"}},
            ]
            messages: Any = [
                *ASK["messages"],
                {"role": "assistant", "content": first.content},
                {"role": "user", "content": results},
            ]
            second = await client.messages.create(**{**ASK, "messages": messages}, tools=TOOLS)
            assert second.content[0].type == "text"
            assistant, good, bad, user = engine.messages()[1:]
            assert assistant["tool_calls"][0]["function"] == {
                "name": "get_weather",
                "arguments": {"city": "Paris"},
            }
            assert assistant["reasoning_content"].strip() == "Hm."
            assert assistant["content"].strip() == "Let me look."
            assert (good["role"], good["tool_call_id"], good["content"]) == (
                "tool",
                call.id,
                "20 degrees",
            )
            assert bad["content"] == "Error: broken"
            assert (user["role"], user["content"]) == ("user", "And now?")

    run(test)


def test_prefilled_answer_is_continued() -> None:
    async def test() -> None:
        async with serving(" sunny.") as (client, engine):
            messages: Any = [*ASK["messages"], {"role": "assistant", "content": "It is"}]
            answer = await client.messages.create(**{**ASK, "messages": messages})
            assert answer.content[0].type == "text"
            assert answer.content[0].text == " sunny."
            assert engine.prompt().endswith('"It is')

    run(test)


def test_client_that_leaves_gets_no_end_of_the_message() -> None:
    async def test() -> None:
        with scripted("A long story.") as (app, engine):
            sent = await leave_early(app, engine, "/v1/messages", {**ASK, "stream": True})
            assert b"message_start" in sent
            assert b"message_stop" not in sent
            assert engine.aborted == {1}

    run(test)


def test_stop_sequence_is_named() -> None:
    async def test() -> None:
        async with serving("one two three four") as (client, _):
            stops = ["zzz", " three"]
            whole = await client.messages.create(**ASK, stop_sequences=stops)
            async with client.messages.stream(**ASK, stop_sequences=stops) as stream:
                streamed = await stream.get_final_message()
            for answer in (whole, streamed):
                assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", " three")
                assert answer.content[0].type == "text"
                assert answer.content[0].text == "one two"

    run(test)


def test_cut_tool_call_is_not_lost() -> None:
    async def test() -> None:
        async with serving(CALL) as (client, _):
            body = {**ASK, "max_tokens": 40}
            answer = await client.messages.create(**body, tools=TOOLS)
            assert answer.stop_reason == "max_tokens"
            assert answer.usage.output_tokens == 40
            assert not [block for block in answer.content if block.type == "tool_use"]
            assert answer.content[-1].type == "text"
            assert "get_weather" in answer.content[-1].text

    run(test)


@pytest.mark.parametrize(
    ("thinking", "line"),
    [
        ({"type": "enabled", "budget_tokens": 1024}, "thinking=True"),
        ({"type": "adaptive"}, "thinking=True"),
        ({"type": "disabled"}, "thinking=False"),
    ],
)
def test_thinking_sets_the_switch_of_the_template(thinking: Any, line: str) -> None:
    async def test() -> None:
        async with serving() as (client, engine):
            await client.messages.create(**ASK, thinking=thinking, output_config={"effort": "low"})
            assert line in engine.prompt().splitlines()
            assert "effort=low" in engine.prompt().splitlines()

    run(test)


def test_omitted_thinking_leaves_an_empty_block() -> None:
    async def test() -> None:
        async with serving("<think>\nsecret\n</think>\n\nSunny.") as (client, _):
            thinking: Any = {"type": "adaptive", "display": "omitted"}
            whole = await client.messages.create(**ASK, thinking=thinking)
            async with client.messages.stream(**ASK, thinking=thinking) as stream:
                streamed = await stream.get_final_message()
            for answer in (whole, streamed):
                assert answer.content[0].type == "thinking"
                assert answer.content[0].thinking == ""

    run(test)


def test_count_tokens_equals_the_usage() -> None:
    async def test() -> None:
        async with serving() as (client, _):
            more: Any = {"tools": TOOLS, "system": [{"type": "text", "text": "Be short."}]}
            asked = {key: value for key, value in ASK.items() if key != "max_tokens"}
            counted = await client.messages.count_tokens(**asked, **more)
            answer = await client.messages.create(**ASK, **more)
            read = answer.usage.cache_read_input_tokens
            assert read is not None
            assert counted.input_tokens == answer.usage.input_tokens + read

    run(test)


def test_tool_choice_none_hides_the_tools() -> None:
    async def test() -> None:
        async with serving(CALL) as (client, engine):
            answer = await client.messages.create(**ASK, tools=TOOLS, tool_choice={"type": "none"})
            assert engine.tools() is None
            assert [block.type for block in answer.content] == ["text"]

    run(test)


@pytest.mark.parametrize(
    "choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}, {"type": "auto"}]
)
def test_forced_tool_use_constrains_the_reply(choice: Any) -> None:
    async def test() -> None:
        async with serving(CALL) as (client, engine):
            answer = await client.messages.create(**ASK, tools=TOOLS, tool_choice=choice)
            assert answer.content[-1].type == "tool_use"
            is_forced = engine.submitted[0].grammar is not None
            assert is_forced == (choice["type"] != "auto")

    run(test)


def test_output_schema_constrains_the_reply() -> None:
    async def test() -> None:
        async with serving('{"a": 1}') as (client, engine):
            output: Any = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
            await client.messages.create(**ASK, output_config=output)
            assert engine.submitted[0].grammar is not None

    run(test)


def test_strict_tools_reach_the_server_but_not_the_template() -> None:
    async def test() -> None:
        async with serving(CALL) as (client, engine):
            tools: Any = [{**TOOLS[0], "strict": True}]
            answer = await client.messages.create(**ASK, tools=tools)
            assert answer.stop_reason == "tool_use"
            assert engine.submitted[0].grammar is not None
            assert "strict" not in engine.tools()[0]["function"]

    run(test)


def test_parallel_tool_use_can_be_disabled() -> None:
    async def test() -> None:
        async with serving(f"{CALL}\n{CALL}") as (client, _):
            choice: Any = {"type": "auto", "disable_parallel_tool_use": True}
            answer = await client.messages.create(**ASK, tools=TOOLS, tool_choice=choice)
            assert [block.type for block in answer.content] == ["tool_use"]

    run(test)


def test_unknown_fields_are_named_in_a_header() -> None:
    async def test() -> None:
        async with serving() as (client, _):
            raw = await client.messages.with_raw_response.create(**ASK, extra_body={"shiny": 1})
            assert raw.headers["x-tokenspeed-ignored-fields"] == "shiny"

    run(test)


@pytest.mark.parametrize(
    "change",
    [
        {"max_tokens": 0},
        {"messages": []},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]},
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "other"}},
        {"tools": TOOLS, "tool_choice": {"type": "tool"}},
        {"extra_body": {"mcp_servers": [{"url": "http://x"}]}},
        {"extra_body": {"temperature": -1}},
    ],
)
def test_wrong_requests_get_errors_in_anthropics_shape(change: Any) -> None:
    import anthropic

    async def test() -> None:
        async with serving() as (client, engine):
            with pytest.raises(anthropic.BadRequestError) as caught:
                await client.messages.create(**{**ASK, **change})
            body: Any = caught.value.body
            assert body["type"] == "error"
            assert body["error"]["type"] == "invalid_request_error"
            assert not engine.submitted

    run(test)


def test_models_are_listed_for_anthropics_client() -> None:
    async def test() -> None:
        async with serving(created=1) as (client, _):
            (model,) = [model async for model in client.models.list()]
            assert (model.id, model.type, model.display_name) == ("fake", "model", "fake")
            assert model.created_at.timestamp() == 1
            assert (await client.models.retrieve("fake")).id == "fake"

    run(test)


def test_wrong_key_and_model_have_their_own_errors() -> None:
    import anthropic

    async def test() -> None:
        async with serving(api_key="secret") as (client, _):
            await client.messages.create(**ASK)
            wrong = client.with_options(api_key="wrong")
            with pytest.raises(anthropic.AuthenticationError) as refused:
                await wrong.messages.create(**ASK)
            body: Any = refused.value.body
            assert body["error"]["type"] == "authentication_error"
            with pytest.raises(anthropic.NotFoundError):
                await client.messages.create(**{**ASK, "model": "other"})

    run(test)


def test_beta_client_and_its_fields_work() -> None:
    async def test() -> None:
        async with serving("Hi.") as (client, _):
            answer = await client.beta.messages.create(
                **ASK,
                betas=["interleaved-thinking-2025-05-14"],
                context_management={"edits": [{"type": "clear_thinking_20251015"}]},
                metadata={"user_id": "me"},
                service_tier="auto",
            )
            assert answer.content[0].type == "text"

    run(test)
