"""litellm: chats, streams, tools, structured output, text completions, the Responses API and Messages."""

from __future__ import annotations

import json
from typing import Any

import litellm
import pytest
from pydantic import BaseModel
from running_server import Server

CLIENT = "litellm"
SUM: Any = [{"role": "user", "content": "What is 23 + 45?"}]
WEATHER: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
EXTRACT: Any = [
    {"role": "user", "content": "Extract name and city as JSON: Maria lives in Lisbon."}
]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
PROVIDERS = ("openai", "hosted_vllm")


class Person(BaseModel):
    name: str
    city: str


@pytest.fixture(params=PROVIDERS)
def ask(server: Server, request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return the options of a greedy call, for litellm's providers for servers of this kind."""
    return {
        "model": f"{request.param}/demo",
        "api_base": server.v1,
        "api_key": server.key,
        "temperature": 0,
        "max_retries": 0,
    }


@pytest.fixture
def ask_openai(server: Server) -> dict[str, Any]:
    return {
        "model": "openai/demo",
        "api_base": server.v1,
        "api_key": server.key,
        "max_retries": 0,
    }


def text(answer: Any) -> str:
    content = answer.choices[0].message.content
    assert isinstance(content, str)
    return content


def test_chat_answers(ask: dict[str, Any]) -> None:
    answer: Any = litellm.completion(messages=SUM, **ask)
    assert "68" in text(answer)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_chat_streams(ask: dict[str, Any]) -> None:
    chunks: Any = litellm.completion(messages=SUM, stream=True, **ask)
    assert "68" in "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def test_chunks_build_the_answer(ask: dict[str, Any]) -> None:
    chunks: Any = litellm.completion(
        messages=SUM, stream=True, stream_options={"include_usage": True}, **ask
    )
    built: Any = litellm.stream_chunk_builder(list(chunks), messages=SUM)
    whole: Any = litellm.completion(messages=SUM, **ask)
    assert text(built) == text(whole)
    assert built.usage.completion_tokens == whole.usage.completion_tokens


async def test_async_chat_answers(ask: dict[str, Any]) -> None:
    assert "68" in text(await litellm.acompletion(messages=SUM, **ask))


async def test_async_chat_streams(ask: dict[str, Any]) -> None:
    chunks: Any = await litellm.acompletion(messages=SUM, stream=True, **ask)
    assert "68" in "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])


def test_batch_answers_each(ask: dict[str, Any]) -> None:
    answers: Any = litellm.batch_completion(messages=[SUM, SUM], **ask)
    assert ["68" in text(answer) for answer in answers] == [True, True]


def test_reasoning_is_separate(ask: dict[str, Any]) -> None:
    message = litellm.completion(messages=SUM, **ask).choices[0].message  # type: ignore[union-attr]
    assert "carry" in message.reasoning_content


def test_reasoning_effort_is_accepted(ask: dict[str, Any]) -> None:
    allowed = ["reasoning_effort"]
    answer = litellm.completion(
        messages=SUM, reasoning_effort="low", allowed_openai_params=allowed, **ask
    )
    assert "68" in text(answer)


def test_tool_is_called(ask: dict[str, Any]) -> None:
    answer: Any = litellm.completion(messages=WEATHER, tools=[TOOL], **ask)
    (call,) = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    assert answer.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize(
    "forced",
    ["required", {"type": "function", "function": {"name": "get_weather"}}],
    ids=["required", "named"],
)
def test_tool_call_is_forced(ask: dict[str, Any], forced: Any) -> None:
    answer: Any = litellm.completion(messages=SUM, tools=[TOOL], tool_choice=forced, **ask)
    for call in answer.choices[0].message.tool_calls:
        assert set(json.loads(call.function.arguments)) == {"city"}


def test_tool_call_streams(ask: dict[str, Any]) -> None:
    chunks: Any = litellm.completion(messages=WEATHER, tools=[TOOL], stream=True, **ask)
    built: Any = litellm.stream_chunk_builder(list(chunks), messages=WEATHER)
    (call,) = built.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}


def test_answer_from_tool_result(ask: dict[str, Any]) -> None:
    message = litellm.completion(messages=WEATHER, tools=[TOOL], **ask).choices[0].message  # type: ignore[union-attr]
    result = {
        "role": "tool",
        "tool_call_id": message.tool_calls[0].id,
        "name": "get_weather",
        "content": '{"temperature": 21}',
    }
    answer = litellm.completion(messages=[*WEATHER, message, result], tools=[TOOL], **ask)
    assert "21" in text(answer)


def test_pydantic_model_is_a_response_format(ask: dict[str, Any]) -> None:
    answer = litellm.completion(messages=EXTRACT, response_format=Person, **ask)
    assert Person.model_validate_json(text(answer)) == Person(name="Maria", city="Lisbon")


def test_json_object_is_json(ask: dict[str, Any]) -> None:
    answer = litellm.completion(messages=EXTRACT, response_format={"type": "json_object"}, **ask)
    assert json.loads(text(answer)) == {"name": "Maria", "city": "Lisbon"}


def test_log_probabilities_are_returned(ask: dict[str, Any]) -> None:
    answer: Any = litellm.completion(messages=SUM, logprobs=True, top_logprobs=2, **ask)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    assert all(len(entry.top_logprobs) == 2 for entry in content)


def test_settings_are_accepted(ask: dict[str, Any]) -> None:
    answer: Any = litellm.completion(
        messages=SUM,
        n=2,
        seed=3,
        top_p=0.9,
        stop=["%%"],
        presence_penalty=0.1,
        frequency_penalty=0.1,
        logit_bias={"5": -1},
        max_tokens=300,
        user="ann",
        extra_body={"top_k": 5},
        extra_headers={"x-team": "tests"},
        **ask,
    )
    assert len(answer.choices) == 2


def test_text_completion_continues(ask_openai: dict[str, Any]) -> None:
    options = {**ask_openai, "model": "text-completion-openai/demo", "temperature": 0}
    whole: Any = litellm.text_completion(prompt="one two", max_tokens=4, **options)
    chunks: Any = litellm.text_completion(prompt="one two", max_tokens=4, stream=True, **options)
    assert "".join(chunk.choices[0].text or "" for chunk in chunks) == whole.choices[0].text


def test_response_is_created(ask_openai: dict[str, Any]) -> None:
    answer: Any = litellm.responses(input="What is 23 + 45?", temperature=0, **ask_openai)
    texts = [part.text for item in answer.output if item.type == "message" for part in item.content]
    assert "68" in texts[0]


def test_response_streams(ask_openai: dict[str, Any]) -> None:
    events: Any = litellm.responses(input="What is 23 + 45?", stream=True, **ask_openai)
    kinds = [str(getattr(event.type, "value", event.type)) for event in events]
    assert "response.output_text.delta" in kinds
    assert kinds[-1] == "response.completed"


async def test_anthropic_message_is_created(server: Server) -> None:
    answer: Any = await litellm.anthropic.messages.acreate(
        model="anthropic/demo",
        api_base=server.url,
        api_key=server.key,
        messages=SUM,
        max_tokens=300,
    )
    assert any("68" in part.get("text", "") for part in answer["content"])


def test_anthropic_provider_answers(server: Server) -> None:
    answer = litellm.completion(
        model="anthropic/demo",
        api_base=server.url,
        api_key=server.key,
        messages=SUM,
        max_tokens=300,
        temperature=0,
    )
    assert "68" in text(answer)


def test_router_balances_deployments(ask_openai: dict[str, Any]) -> None:
    deployments: Any = [
        {"model_name": "sums", "litellm_params": {**ask_openai, "timeout": seconds}}
        for seconds in (100, 200)
    ]
    router = litellm.Router(model_list=deployments, num_retries=0)
    assert "68" in text(router.completion(model="sums", messages=SUM, temperature=0))


def test_models_are_listed(server: Server) -> None:
    found = litellm.get_valid_models(
        check_provider_endpoint=True,
        custom_llm_provider="openai",
        api_base=server.url,
        api_key=server.key,
    )
    assert any("demo" in name for name in found)


def test_wrong_key_is_refused(ask: dict[str, Any]) -> None:
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(messages=SUM, **{**ask, "api_key": "wrong"})


def test_wrong_model_is_not_found(ask: dict[str, Any]) -> None:
    provider = ask["model"].partition("/")[0]
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(messages=SUM, **{**ask, "model": f"{provider}/gpt-9"})


def test_long_prompt_exceeds_the_context(ask: dict[str, Any]) -> None:
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(messages=[{"role": "user", "content": "word " * 9000}], **ask)


@pytest.mark.refused("images: the demo reads text only")
def test_image_is_refused(ask: dict[str, Any]) -> None:
    image = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    with pytest.raises(litellm.BadRequestError) as caught:
        litellm.completion(messages=[{"role": "user", "content": [image]}], **ask)
    assert "image_url" in str(caught.value)


@pytest.mark.refused("embeddings: there is no embedding model")
def test_embeddings_are_refused(ask_openai: dict[str, Any]) -> None:
    with pytest.raises(litellm.NotFoundError):
        litellm.embedding(input=["a"], **ask_openai)
