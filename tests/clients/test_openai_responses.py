"""OpenAI's client for Python: the Responses API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel
from running_server import Server

CLIENT = "openai"
TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
SUM: Any = {"model": "demo", "input": "What is 23 + 45?", "temperature": 0}
WEATHER: Any = {**SUM, "input": "What is the weather in Paris?", "tools": [TOOL]}
EXTRACT: Any = {**SUM, "input": "Extract name and city as JSON: Maria lives in Lisbon."}


class Person(BaseModel):
    name: str
    city: str


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.v1, api_key=server.key, max_retries=0) as found:
        yield found


def calls(response: Any) -> list[Any]:
    return [item for item in response.output if item.type == "function_call"]


def test_response_answers(client: openai.OpenAI) -> None:
    response = client.responses.create(**SUM)
    assert "68" in response.output_text
    assert response.status == "completed"
    assert response.usage is not None
    assert response.usage.total_tokens > 0


def test_reasoning_is_an_item(client: openai.OpenAI) -> None:
    response = client.responses.create(**SUM)
    assert [item.type for item in response.output] == ["reasoning", "message"]


def test_response_streams_events(client: openai.OpenAI) -> None:
    events = list(client.responses.create(**SUM, stream=True))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert events[0].type == "response.created"
    assert events[-1].type == "response.completed"
    assert "".join(deltas) == events[-1].response.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_stream_helper_gives_final_response(client: openai.OpenAI) -> None:
    with client.responses.stream(**SUM) as stream:
        kinds = {event.type for event in stream}
        response = stream.get_final_response()
    assert "response.output_text.delta" in kinds
    assert "68" in response.output_text


async def test_async_response_answers(server: Server) -> None:
    async with openai.AsyncOpenAI(base_url=server.v1, api_key=server.key) as client:
        response = await client.responses.create(**SUM)
    assert "68" in response.output_text


async def test_async_response_streams(server: Server) -> None:
    async with (
        openai.AsyncOpenAI(base_url=server.v1, api_key=server.key) as client,
        client.responses.stream(**SUM) as stream,
    ):
        response = await stream.get_final_response()
    assert "68" in response.output_text


def test_conversation_continues_by_id(client: openai.OpenAI) -> None:
    first = client.responses.create(model="demo", input="My name is Maria.", temperature=0)
    second = client.responses.create(
        model="demo", input="What is my name?", previous_response_id=first.id, temperature=0
    )
    assert "Maria" in second.output_text


def test_conversation_continues_by_output_items(client: openai.OpenAI) -> None:
    first = client.responses.create(model="demo", input="My name is Maria.", temperature=0)
    items: Any = [
        {"role": "user", "content": "My name is Maria."},
        *first.output,
        {"role": "user", "content": "What is my name?"},
    ]
    second = client.responses.create(model="demo", input=items, temperature=0, store=False)
    assert "Maria" in second.output_text


def test_instructions_are_accepted(client: openai.OpenAI) -> None:
    response = client.responses.create(**SUM, instructions="You are a calculator.")
    assert response.status == "completed"


def test_function_is_called(client: openai.OpenAI) -> None:
    (call,) = calls(client.responses.create(**WEATHER))
    assert call.name == "get_weather"
    assert json.loads(call.arguments) == {"city": "Paris"}


@pytest.mark.parametrize(
    "forced", ["required", {"type": "function", "name": "get_weather"}], ids=["required", "named"]
)
def test_function_call_is_forced(client: openai.OpenAI, forced: Any) -> None:
    response = client.responses.create(**{**SUM, "tools": [TOOL], "tool_choice": forced})
    assert {call.name for call in calls(response)} == {"get_weather"}


def test_function_call_streams(client: openai.OpenAI) -> None:
    events = list(client.responses.create(**WEATHER, stream=True))
    deltas = [
        event.delta for event in events if event.type == "response.function_call_arguments.delta"
    ]
    assert json.loads("".join(deltas)) == {"city": "Paris"}


def test_parallel_calls_can_be_turned_off(client: openai.OpenAI) -> None:
    assert len(calls(client.responses.create(**WEATHER, parallel_tool_calls=False))) == 1


def test_answer_from_function_output(client: openai.OpenAI) -> None:
    first = client.responses.create(**WEATHER)
    (call,) = calls(first)
    result: Any = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": '{"temperature": 21, "sky": "sunny"}',
    }
    second = client.responses.create(
        model="demo", input=[result], previous_response_id=first.id, tools=[TOOL], temperature=0
    )
    assert "21" in second.output_text


def test_parse_returns_pydantic_model(client: openai.OpenAI) -> None:
    response = client.responses.parse(**EXTRACT, text_format=Person)
    assert response.output_parsed == Person(name="Maria", city="Lisbon")


def test_json_object_is_json(client: openai.OpenAI) -> None:
    response = client.responses.create(**EXTRACT, text={"format": {"type": "json_object"}})
    assert json.loads(response.output_text) == {"name": "Maria", "city": "Lisbon"}


def test_max_output_tokens_cuts(client: openai.OpenAI) -> None:
    response = client.responses.create(**SUM, max_output_tokens=16)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"


def test_logprobs_are_included(client: openai.OpenAI) -> None:
    response = client.responses.create(
        **SUM, include=["message.output_text.logprobs"], top_logprobs=2
    )
    part: Any = response.output[-1].content[0]  # type: ignore[union-attr, index]
    assert part.logprobs


def test_reasoning_effort_and_metadata(client: openai.OpenAI) -> None:
    response = client.responses.create(
        **SUM, reasoning={"effort": "none"}, metadata={"task": "sum"}, user="ann"
    )
    assert response.metadata == {"task": "sum"}
    assert [item.type for item in response.output] == ["message"]


def test_response_is_stored_and_deleted(client: openai.OpenAI) -> None:
    made = client.responses.create(**SUM)
    assert client.responses.retrieve(made.id).output_text == made.output_text
    (item,) = client.responses.input_items.list(made.id)
    assert item.type == "message"
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_unknown_previous_response_is_an_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.responses.create(**SUM, previous_response_id="resp_none")
    assert caught.value.code == "previous_response_not_found"


@pytest.mark.refused("images: the demo reads text only")
def test_image_is_refused(client: openai.OpenAI) -> None:
    content = [{"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": "low"}]
    items: Any = [{"role": "user", "content": content}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="demo", input=items)
    assert "input_image" in caught.value.message


@pytest.mark.refused("tools that OpenAI's servers run")
def test_hosted_tool_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**SUM, tools=[{"type": "web_search"}])
    assert "web_search" in caught.value.message


@pytest.mark.refused("background responses")
def test_background_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**SUM, background=True)
    assert caught.value.param == "background"
