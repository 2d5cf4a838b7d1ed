"""Anthropic's client for Python: messages, streams, tools, thinking and errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from pydantic import BaseModel
from running_server import Server

CLIENT = "anthropic"
TOOL: Any = {
    "name": "get_weather",
    "description": "Get the weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
BASE: Any = {"model": "demo", "max_tokens": 300}
SUM: Any = {**BASE, "messages": [{"role": "user", "content": "What is 23 + 45?"}]}
QUESTION: Any = {"role": "user", "content": "What is the weather in Paris?"}
WEATHER: Any = {**BASE, "messages": [QUESTION], "tools": [TOOL]}
GREEDY: Any = {"extra_body": {"temperature": 0}}


class Person(BaseModel):
    name: str
    city: str


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key=server.key, max_retries=0) as found:
        yield found


def text(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_message_answers(client: anthropic.Anthropic) -> None:
    message = client.messages.create(**SUM, **GREEDY)
    assert "68" in text(message)
    assert message.stop_reason == "end_turn"
    assert message.role == "assistant"
    assert message.usage.output_tokens > 0


def test_message_streams(client: anthropic.Anthropic) -> None:
    with client.messages.stream(**SUM, **GREEDY) as stream:
        streamed = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert streamed == text(message)
    assert "68" in streamed


def test_raw_events_have_their_order(client: anthropic.Anthropic) -> None:
    kinds = [event.type for event in client.messages.create(**SUM, stream=True, **GREEDY)]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop")


async def test_async_message_answers(server: Server) -> None:
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key=server.key) as client:
        assert "68" in text(await client.messages.create(**SUM, **GREEDY))


async def test_async_message_streams(server: Server) -> None:
    async with (
        anthropic.AsyncAnthropic(base_url=server.url, api_key=server.key) as client,
        client.messages.stream(**SUM, **GREEDY) as stream,
    ):
        assert "68" in text(await stream.get_final_message())


def test_bearer_token_is_accepted(server: Server) -> None:
    client = anthropic.Anthropic(base_url=server.url, auth_token=server.key, max_retries=0)
    assert "68" in text(client.messages.create(**SUM, **GREEDY))


@pytest.mark.parametrize(
    "thinking",
    [{"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}],
    ids=["enabled", "adaptive"],
)
def test_thinking_is_a_block(client: anthropic.Anthropic, thinking: Any) -> None:
    ask = {**SUM, "max_tokens": 2000, "thinking": thinking}
    message = client.messages.create(**ask)
    assert [block.type for block in message.content] == ["thinking", "text"]


def test_thinking_can_be_disabled(client: anthropic.Anthropic) -> None:
    message = client.messages.create(**SUM, thinking={"type": "disabled"}, **GREEDY)
    assert [block.type for block in message.content] == ["text"]


def test_thinking_streams(client: anthropic.Anthropic) -> None:
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    with client.messages.stream(**{**SUM, "max_tokens": 2000}, thinking=thinking) as stream:
        deltas = [event for event in stream if event.type == "thinking"]
    assert deltas


def test_system_as_text_and_cached_blocks(client: anthropic.Anthropic) -> None:
    block: Any = {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}
    for system in ("Be brief.", [block]):
        assert client.messages.create(**SUM, system=system, **GREEDY).content


def test_second_turn_after_own_message(client: anthropic.Anthropic) -> None:
    name: Any = {"role": "user", "content": "My name is Maria."}
    first = client.messages.create(**BASE, messages=[name], **GREEDY)
    turn: Any = {"role": "assistant", "content": first.content}
    question: Any = {"role": "user", "content": [{"type": "text", "text": "What is my name?"}]}
    second = client.messages.create(**BASE, messages=[name, turn, question], **GREEDY)
    assert "Maria" in text(second)


def test_tool_is_called(client: anthropic.Anthropic) -> None:
    message = client.messages.create(**WEATHER, **GREEDY)
    (use,) = [block for block in message.content if block.type == "tool_use"]
    assert (use.name, use.input) == ("get_weather", {"city": "Paris"})
    assert message.stop_reason == "tool_use"


@pytest.mark.parametrize("forced", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_tool_use_is_forced(client: anthropic.Anthropic, forced: Any) -> None:
    ask = {**SUM, "tools": [TOOL], "tool_choice": forced}
    message = client.messages.create(**ask, **GREEDY)
    assert {block.name for block in message.content if block.type == "tool_use"} == {"get_weather"}


def test_parallel_tool_use_can_be_disabled(client: anthropic.Anthropic) -> None:
    choice: Any = {"type": "auto", "disable_parallel_tool_use": True}
    message = client.messages.create(**WEATHER, tool_choice=choice, **GREEDY)
    assert len([block for block in message.content if block.type == "tool_use"]) == 1


def test_tool_use_streams(client: anthropic.Anthropic) -> None:
    with client.messages.stream(**WEATHER, **GREEDY) as stream:
        parts = [event.partial_json for event in stream if event.type == "input_json"]
        message = stream.get_final_message()
    assert "Paris" in "".join(parts)
    assert message.content[-1].input == {"city": "Paris"}  # type: ignore[union-attr]


def test_answer_from_tool_result(client: anthropic.Anthropic) -> None:
    first = client.messages.create(**WEATHER, **GREEDY)
    (use,) = [block for block in first.content if block.type == "tool_use"]
    result: Any = {
        "type": "tool_result",
        "tool_use_id": use.id,
        "content": [{"type": "text", "text": '{"temperature": 21, "sky": "sunny"}'}],
    }
    turns: Any = [
        QUESTION,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    assert "21" in text(client.messages.create(**{**WEATHER, "messages": turns}, **GREEDY))


def test_tool_runner_runs_functions(client: anthropic.Anthropic) -> None:
    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """Get the weather in a city.

        Args:
            city: The city.
        """
        return f'{{"city": "{city}", "temperature": 21}}'

    runner = client.beta.messages.tool_runner(
        **BASE, messages=[QUESTION], tools=[get_weather], **GREEDY
    )
    assert "21" in text(runner.until_done())


def test_parse_returns_pydantic_model(client: anthropic.Anthropic) -> None:
    extract: Any = [
        {"role": "user", "content": "Extract name and city as JSON: Maria lives in Lisbon."}
    ]
    message = client.messages.parse(**BASE, messages=extract, output_format=Person, **GREEDY)
    assert message.parsed_output == Person(name="Maria", city="Lisbon")


def test_stop_sequence_is_named(client: anthropic.Anthropic) -> None:
    message = client.messages.create(**SUM, stop_sequences=["="], **GREEDY)
    assert message.stop_reason == "stop_sequence"
    assert message.stop_sequence == "="


def test_max_tokens_cuts(client: anthropic.Anthropic) -> None:
    message = client.messages.create(**{**SUM, "max_tokens": 3})
    assert message.stop_reason == "max_tokens"
    assert message.usage.output_tokens == 3


def test_cached_tokens_are_counted(client: anthropic.Anthropic) -> None:
    ask = {**BASE, "messages": [{"role": "user", "content": "Repeat: " + "four five " * 40}]}
    client.messages.create(**{**ask, "max_tokens": 1})
    usage = client.messages.create(**{**ask, "max_tokens": 1}).usage
    assert usage.cache_read_input_tokens


def test_tokens_are_counted(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(
        model="demo", messages=SUM["messages"], tools=[TOOL], system="Be brief."
    )
    usage = client.messages.create(**SUM, tools=[TOOL], system="Be brief.").usage
    cached = usage.cache_read_input_tokens or 0
    assert counted.input_tokens == usage.input_tokens + cached


def test_metadata_and_tier_are_accepted(client: anthropic.Anthropic) -> None:
    message = client.messages.create(
        **SUM, metadata={"user_id": "ann"}, service_tier="auto", **GREEDY
    )
    assert "68" in text(message)


def test_models_are_listed(client: anthropic.Anthropic) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]


def test_request_id_is_returned(client: anthropic.Anthropic) -> None:
    assert client.messages.create(**SUM)._request_id


def test_wrong_key_is_refused(server: Server) -> None:
    client = anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError):
        client.messages.create(**SUM)


def test_wrong_model_is_not_found(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.create(**{**SUM, "model": "claude-9"})
    assert caught.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]


def test_long_prompt_is_refused(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(**BASE, messages=[{"role": "user", "content": "word " * 9000}])
    assert caught.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]


@pytest.mark.refused("images: the demo reads text only")
def test_image_is_refused(client: anthropic.Anthropic) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "AA=="}
    content = [{"type": "image", "source": source}]
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(**BASE, messages=[{"role": "user", "content": content}])  # type: ignore[typeddict-item]
    assert "image" in caught.value.message


@pytest.mark.refused("documents")
def test_document_is_refused(client: anthropic.Anthropic) -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "a"}
    content: Any = [{"type": "document", "source": source}]
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(**BASE, messages=[{"role": "user", "content": content}])
    assert "document" in caught.value.message


@pytest.mark.refused("tools that Anthropic's servers run")
def test_server_tool_is_refused(client: anthropic.Anthropic) -> None:
    search: Any = {"type": "web_search_20250305", "name": "web_search"}
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(**SUM, tools=[search])
    assert "web_search" in caught.value.message


@pytest.mark.refused("batches over HTTP: `tokenspeed run-batch` reads files")
def test_message_batches_are_refused(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.batches.list()
