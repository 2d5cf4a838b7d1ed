"""langchain-openai: ChatOpenAI with chat completions, with the Responses API, and OpenAI."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, SecretStr
from running_server import Server

CLIENT = "langchain-openai"
SUM = "What is 23 + 45?"
WEATHER = "What is the weather in Paris?"
EXTRACT = "Extract name and city as JSON: Maria lives in Lisbon."


class Person(BaseModel):
    """A person."""

    name: str
    city: str


@tool
def get_weather(city: str) -> str:
    """Get the weather in a city."""
    return f'{{"city": "{city}", "temperature": 21}}'


def chat(server: Server, **options: Any) -> ChatOpenAI:
    defaults: dict[str, Any] = {"model": "demo", "temperature": 0, "max_retries": 0}
    return ChatOpenAI(base_url=server.v1, api_key=SecretStr(server.key), **{**defaults, **options})


@pytest.fixture(params=["chat", "responses"])
def model(server: Server, request: pytest.FixtureRequest) -> ChatOpenAI:
    return chat(server, use_responses_api=request.param == "responses")


def test_model_answers(model: ChatOpenAI) -> None:
    answer = model.invoke(SUM)
    assert "68" in answer.text
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] > 0


def test_model_streams(model: ChatOpenAI) -> None:
    assert "68" in "".join(chunk.text for chunk in model.stream(SUM))


async def test_async_model_streams(model: ChatOpenAI) -> None:
    assert "68" in "".join([chunk.text async for chunk in model.astream(SUM)])


def test_batch_answers_each(model: ChatOpenAI) -> None:
    answers = model.batch([SUM, "What is 20 + 30?"])
    assert [total in answer.text for total, answer in zip(("68", "50"), answers, strict=True)] == [
        True,
        True,
    ]


def test_streamed_usage_is_counted(server: Server) -> None:
    chunks = list(chat(server, stream_usage=True).stream(SUM))
    assert any(chunk.usage_metadata for chunk in chunks)


def test_tool_is_called(model: ChatOpenAI) -> None:
    answer = model.bind_tools([get_weather]).invoke(WEATHER)
    assert [call["args"] for call in answer.tool_calls] == [{"city": "Paris"}]


@pytest.mark.parametrize("strict", [True, False])
def test_strict_tool_is_called(model: ChatOpenAI, strict: bool) -> None:
    answer = model.bind_tools([get_weather], strict=strict).invoke(WEATHER)
    assert [call["name"] for call in answer.tool_calls] == ["get_weather"]


@pytest.mark.parametrize("choice", ["any", "get_weather", "none"])
def test_tool_choice_is_held(model: ChatOpenAI, choice: str) -> None:
    answer = model.bind_tools([get_weather], tool_choice=choice).invoke(SUM)
    expected = set() if choice == "none" else {"get_weather"}
    assert {call["name"] for call in answer.tool_calls} == expected


def test_parallel_calls_can_be_turned_off(model: ChatOpenAI) -> None:
    answer = model.bind_tools([get_weather], parallel_tool_calls=False).invoke(WEATHER)
    assert len(answer.tool_calls) == 1


def test_answer_from_tool_result(model: ChatOpenAI) -> None:
    able = model.bind_tools([get_weather])
    question = HumanMessage(WEATHER)
    call = able.invoke([question])
    result = get_weather.invoke(call.tool_calls[0])
    assert isinstance(result, ToolMessage)
    assert "21" in able.invoke([question, call, result]).text


def test_turns_of_all_roles(model: ChatOpenAI) -> None:
    turns = [
        SystemMessage("Be brief."),
        HumanMessage("My name is Maria."),
        AIMessage("Nice to meet you, Maria!"),
        HumanMessage("What is my name?"),
    ]
    assert "Maria" in model.invoke(turns).text


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_structured_output_is_a_model(model: ChatOpenAI, method: Any) -> None:
    found = model.with_structured_output(Person, method=method).invoke(EXTRACT)
    assert isinstance(found, Person)
    if method != "function_calling":
        assert found == Person(name="Maria", city="Lisbon")


def test_structured_output_streams(model: ChatOpenAI) -> None:
    *_, last = model.with_structured_output(Person).stream(EXTRACT)
    assert last == Person(name="Maria", city="Lisbon")


def test_log_probabilities_are_metadata(server: Server) -> None:
    answer = chat(server, logprobs=True, top_logprobs=2).invoke(SUM)
    assert answer.response_metadata["logprobs"]["content"]


def test_settings_are_accepted(server: Server) -> None:
    model = chat(
        server,
        seed=3,
        top_p=0.9,
        n=1,
        stop_sequences=["%%"],
        presence_penalty=0.1,
        frequency_penalty=0.1,
        max_tokens=300,
        reasoning_effort="low",
        service_tier="auto",
        store=False,
        metadata={"task": "sum"},
        extra_body={"top_k": 5},
    )
    assert "68" in model.invoke(SUM).text


def test_completions_continue_text(server: Server) -> None:
    model = OpenAI(
        model="demo", base_url=server.v1, api_key=SecretStr(server.key), max_tokens=4, temperature=0
    )
    assert model.invoke("one two") == "".join(model.stream("one two"))


def test_wrong_key_is_refused(server: Server) -> None:
    with pytest.raises(openai.AuthenticationError):
        chat(Server(server.url, "wrong")).invoke(SUM)


@pytest.mark.refused("images: the demo reads text only")
def test_image_is_refused(model: ChatOpenAI) -> None:
    image = {"type": "image", "url": "https://example.com/a.png"}
    with pytest.raises(openai.BadRequestError) as caught:
        model.invoke([HumanMessage([image])])  # type: ignore[list-item]
    assert "image" in caught.value.message
