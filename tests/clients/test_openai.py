"""OpenAI's client for Python: chat completions, completions, models and errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel
from running_server import Server

CLIENT = "openai"
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
            "additionalProperties": False,
        },
    },
}
STRICT: Any = {"type": "function", "function": {**TOOL["function"], "strict": True}}
PIXEL = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


class Person(BaseModel):
    name: str
    city: str


class Author(BaseModel):
    is_known: bool
    country: Literal["IT", "PT"] | None


class Review(BaseModel):
    verdict: Literal["good", "bad"]
    author: Author


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.v1, api_key=server.key, max_retries=0) as found:
        yield found


def chat(client: openai.OpenAI, messages: Any = SUM, **options: Any) -> Any:
    """Create a chat completion, greedily unless options say otherwise."""
    defaults = {"model": "demo", "temperature": 0}
    return client.chat.completions.create(messages=messages, **{**defaults, **options})


def text(completion: Any) -> str:
    return completion.choices[0].message.content


# Chats


def test_chat_answers(client: openai.OpenAI) -> None:
    completion = chat(client)
    assert "68" in text(completion)
    assert completion.choices[0].finish_reason == "stop"
    assert completion.object == "chat.completion"
    usage = completion.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_chat_streams_same_text(client: openai.OpenAI) -> None:
    chunks = list(chat(client, stream=True))
    parts = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(parts) == text(chat(client))
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_stream_ends_with_usage(client: openai.OpenAI) -> None:
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == chat(client).usage.completion_tokens


def test_stream_helper_accumulates_message(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="demo", messages=SUM, temperature=0) as stream:
        events = [event.type for event in stream]
        completion = stream.get_final_completion()
    assert "content.delta" in events
    assert "content.done" in events
    assert "68" in text(completion)


async def test_async_chat_answers(server: Server) -> None:
    async with openai.AsyncOpenAI(base_url=server.v1, api_key=server.key) as client:
        completion = await client.chat.completions.create(model="demo", messages=SUM, temperature=0)
    assert "68" in text(completion)


async def test_async_chat_streams(server: Server) -> None:
    async with openai.AsyncOpenAI(base_url=server.v1, api_key=server.key) as client:
        stream = await client.chat.completions.create(
            model="demo", messages=SUM, temperature=0, stream=True
        )
        parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "68" in "".join(parts)


def test_raw_response_has_request_id(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(model="demo", messages=SUM)
    assert raw.headers["x-request-id"]
    assert raw.parse()._request_id == raw.headers["x-request-id"]


def test_streaming_response_yields_lines(client: openai.OpenAI) -> None:
    create = client.chat.completions.with_streaming_response.create
    with create(model="demo", messages=SUM, stream=True) as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"


def test_reasoning_is_separate(client: openai.OpenAI) -> None:
    message = chat(client).choices[0].message
    assert "carry" in message.reasoning_content
    assert "carry" not in message.content


def test_reasoning_streams(client: openai.OpenAI) -> None:
    chunks = [chunk.choices[0].delta for chunk in chat(client, stream=True)]
    thoughts = "".join(getattr(delta, "reasoning_content", None) or "" for delta in chunks)
    assert thoughts == chat(client).choices[0].message.reasoning_content


def test_template_switch_turns_reasoning_off(client: openai.OpenAI) -> None:
    options = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
    message = chat(client, **options).choices[0].message
    assert getattr(message, "reasoning_content", None) is None


@pytest.mark.parametrize("effort", ["none", "low", "medium", "high"])
def test_reasoning_effort_is_accepted(client: openai.OpenAI, effort: Any) -> None:
    message = chat(client, reasoning_effort=effort).choices[0].message
    if effort == "none":
        assert getattr(message, "reasoning_content", None) is None
    else:
        assert "68" in message.content


def test_roles_of_all_kinds(client: openai.OpenAI) -> None:
    messages: Any = [
        {"role": "developer", "content": "You are brief."},
        {"role": "user", "content": "What is 20 + 30?", "name": "Ann"},
        {"role": "assistant", "content": "20 + 30 = 50"},
        {"role": "user", "content": [{"type": "text", "text": "What is 23 + 45?"}]},
    ]
    assert "68" in text(chat(client, messages))


def test_second_turn_after_own_message(client: openai.OpenAI) -> None:
    first = chat(client, [{"role": "user", "content": "My name is Maria."}]).choices[0].message
    messages = [
        {"role": "user", "content": "My name is Maria."},
        first,
        {"role": "user", "content": "What is my name?"},
    ]
    assert "Maria" in text(chat(client, messages))


def test_fields_of_the_platform_are_accepted(client: openai.OpenAI) -> None:
    completion = chat(
        client,
        store=False,
        metadata={"task": "sum"},
        service_tier="auto",
        user="ann",
        safety_identifier="ann",
        prompt_cache_key="sums",
        parallel_tool_calls=False,
        tools=[TOOL],
        tool_choice="none",
    )
    assert "68" in text(completion)


def test_unknown_field_is_named_in_header(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model="demo", messages=SUM, extra_body={"weird_option": 1}
    )
    assert "weird_option" in raw.headers["x-tokenspeed-ignored-fields"]


# Sampling


def test_n_gives_several_choices(client: openai.OpenAI) -> None:
    completion = chat(client, n=3, temperature=1, seed=1)
    assert [choice.index for choice in completion.choices] == [0, 1, 2]


def test_n_streams_by_index(client: openai.OpenAI) -> None:
    texts = {0: "", 1: ""}
    for chunk in chat(client, n=2, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts[0] == texts[1] == text(chat(client))


def test_seed_repeats_answer(client: openai.OpenAI) -> None:
    options = {"temperature": 1.5, "seed": 7, "messages": [{"role": "user", "content": "hi"}]}
    assert text(chat(client, **options)) == text(chat(client, **options))


def test_stop_string_ends_text(client: openai.OpenAI) -> None:
    completion = chat(client, stop=["="])
    assert "=" not in text(completion)
    assert completion.choices[0].finish_reason == "stop"


def test_max_completion_tokens_cuts(client: openai.OpenAI) -> None:
    completion = chat(client, max_completion_tokens=5)
    assert completion.choices[0].finish_reason == "length"
    assert completion.usage.completion_tokens == 5


def test_logprobs_of_chat(client: openai.OpenAI) -> None:
    completion = chat(client, logprobs=True, top_logprobs=3)
    content = completion.choices[0].logprobs.content
    assert len(content) == completion.usage.completion_tokens
    assert all(len(entry.top_logprobs) == 3 for entry in content)
    assert all(entry.top_logprobs[0].logprob == entry.logprob for entry in content)


def test_logprobs_stream(client: openai.OpenAI) -> None:
    chunks = list(chat(client, logprobs=True, stream=True))
    lists = [chunk.choices[0].logprobs for chunk in chunks]
    streamed = [entry.token for found in lists if found for entry in found.content]
    whole = chat(client, logprobs=True).choices[0].logprobs.content
    assert streamed == [entry.token for entry in whole]


def test_penalties_and_logit_bias(client: openai.OpenAI) -> None:
    options = {"presence_penalty": 0.1, "frequency_penalty": 0.1, "top_p": 0.9}
    assert text(chat(client, **options, logit_bias={"5": -100}))


def test_sampling_fields_of_vllm(client: openai.OpenAI) -> None:
    body = {"top_k": 5, "min_p": 0.01, "repetition_penalty": 1.0, "min_tokens": 2}
    assert "68" in text(chat(client, extra_body=body))


def test_cached_tokens_are_counted(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": f"Repeat: {'one two three ' * 30}"}]
    chat(client, messages, max_tokens=1)
    usage = chat(client, messages, max_tokens=1).usage
    assert 0 < usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens


# Tools


@pytest.mark.parametrize("tool", [TOOL, STRICT], ids=["plain", "strict"])
def test_tool_is_called(client: openai.OpenAI, tool: Any) -> None:
    choice = chat(client, WEATHER, tools=[tool], tool_choice="auto").choices[0]
    (call,) = choice.message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    assert choice.finish_reason == "tool_calls"


@pytest.mark.parametrize(
    "forced",
    ["required", {"type": "function", "function": {"name": "get_weather"}}],
    ids=["required", "named"],
)
def test_tool_call_is_forced(client: openai.OpenAI, forced: Any) -> None:
    choice = chat(client, tools=[TOOL], tool_choice=forced).choices[0]
    for call in choice.message.tool_calls:
        assert call.function.name == "get_weather"
        assert set(json.loads(call.function.arguments)) == {"city"}


def test_forced_tool_call_streams(client: openai.OpenAI) -> None:
    chunks = chat(client, WEATHER, tools=[TOOL], tool_choice="required", stream=True)
    deltas = [chunk.choices[0].delta.tool_calls or [] for chunk in chunks]
    arguments = "".join(call.function.arguments or "" for calls in deltas for call in calls)
    assert set(json.loads(arguments)) == {"city"}


def test_tool_call_streams(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="demo", messages=WEATHER, temperature=0, tools=[STRICT]
    ) as stream:
        choice = stream.get_final_completion().choices[0]
    (call,) = choice.message.tool_calls or ()
    assert call.function.parsed_arguments == {"city": "Paris"}


def test_tool_choice_none_calls_nothing(client: openai.OpenAI) -> None:
    message = chat(client, WEATHER, tools=[TOOL], tool_choice="none").choices[0].message
    assert not message.tool_calls


def test_parallel_calls_can_be_turned_off(client: openai.OpenAI) -> None:
    choice = chat(client, WEATHER, tools=[TOOL], parallel_tool_calls=False).choices[0]
    assert len(choice.message.tool_calls) == 1


def test_answer_from_tool_result(client: openai.OpenAI) -> None:
    message = chat(client, WEATHER, tools=[TOOL]).choices[0].message
    result = {
        "role": "tool",
        "tool_call_id": message.tool_calls[0].id,
        "content": '{"temperature": 21, "sky": "sunny"}',
    }
    answer = text(chat(client, [*WEATHER, message, result], tools=[TOOL]))
    assert "21" in answer
    assert "sunny" in answer


def test_pydantic_tool_is_parsed(client: openai.OpenAI) -> None:
    class GetWeather(BaseModel):
        """Get the weather in a city."""

        city: str

    completion = client.chat.completions.parse(
        model="demo",
        messages=WEATHER,
        temperature=0,
        tools=[openai.pydantic_function_tool(GetWeather, name="get_weather")],
        tool_choice="required",
    )
    (call,) = completion.choices[0].message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, GetWeather)


# Structured output


def test_parse_returns_pydantic_model(client: openai.OpenAI) -> None:
    completion = client.chat.completions.parse(
        model="demo", messages=EXTRACT, temperature=0, response_format=Person
    )
    assert completion.choices[0].message.parsed == Person(name="Maria", city="Lisbon")


def test_parse_holds_nested_schema(client: openai.OpenAI) -> None:
    completion = client.chat.completions.parse(
        model="demo", messages=SUM, temperature=0, response_format=Review
    )
    assert isinstance(completion.choices[0].message.parsed, Review)


def test_parsed_stream_returns_pydantic_model(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="demo", messages=EXTRACT, temperature=0, response_format=Person
    ) as stream:
        completion = stream.get_final_completion()
    assert completion.choices[0].message.parsed == Person(name="Maria", city="Lisbon")


def test_json_object_is_json(client: openai.OpenAI) -> None:
    completion = chat(client, EXTRACT, response_format={"type": "json_object"})
    assert json.loads(text(completion)) == {"name": "Maria", "city": "Lisbon"}


def test_structured_outputs_of_vllm(client: openai.OpenAI) -> None:
    body = {"structured_outputs": {"choice": ["yes", "no"]}}
    assert text(chat(client, extra_body=body)) in {"yes", "no"}


# Completions


def test_completion_continues_text(client: openai.OpenAI) -> None:
    completion = client.completions.create(model="demo", prompt="one two", temperature=0)
    assert completion.usage is not None
    assert completion.usage.completion_tokens <= 16


def test_completion_streams(client: openai.OpenAI) -> None:
    ask: Any = {"model": "demo", "prompt": "one two", "temperature": 0}
    streamed = "".join(
        chunk.choices[0].text for chunk in client.completions.create(**ask, stream=True)
    )
    assert streamed == client.completions.create(**ask).choices[0].text


def test_completion_takes_many_prompts(client: openai.OpenAI) -> None:
    completion = client.completions.create(model="demo", prompt=["a", "b"], n=2, max_tokens=2)
    assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]


def test_completion_takes_token_ids(client: openai.OpenAI) -> None:
    completion = client.completions.create(model="demo", prompt=[5, 6, 7], max_tokens=2)
    assert completion.usage is not None
    assert completion.usage.prompt_tokens == 3


def test_echo_scores_prompt(client: openai.OpenAI) -> None:
    completion = client.completions.create(
        model="demo", prompt="one two three", echo=True, logprobs=1, max_tokens=0
    )
    choice = completion.choices[0]
    assert choice.text == "one two three"
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[0] is None
    assert all(score <= 0 for score in choice.logprobs.token_logprobs[1:])


def test_best_of_equal_to_n_is_accepted(client: openai.OpenAI) -> None:
    completion = client.completions.create(model="demo", prompt="a", n=2, best_of=2, max_tokens=2)
    assert len(completion.choices) == 2


# Models, tokens, errors


def test_models_are_listed(client: openai.OpenAI) -> None:
    (model,) = client.models.list()
    assert model.id == "demo"
    assert model.created > 0
    assert client.models.retrieve("demo").id == "demo"


def test_text_is_tokenized_and_restored(client: openai.OpenAI, server: Server) -> None:
    count = client.post(
        f"{server.url}/tokenize", cast_to=dict[str, Any], body={"prompt": "Hello you"}
    )
    text = client.post(
        f"{server.url}/detokenize", cast_to=dict[str, Any], body={"tokens": count["tokens"]}
    )
    assert text["prompt"] == "Hello you"


def test_wrong_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        chat(client, model="gpt-9")
    assert caught.value.code == "model_not_found"


def test_wrong_key_is_refused(server: Server) -> None:
    client = openai.OpenAI(base_url=server.v1, api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        chat(client)


def test_long_prompt_names_the_limit(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, [{"role": "user", "content": "word " * 9000}])
    assert caught.value.code == "context_length_exceeded"


def test_wrong_value_names_the_field(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, temperature=-1)
    assert caught.value.param == "temperature"


def test_unknown_route_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.fine_tuning.jobs.list()


# Refused by design


@pytest.mark.refused("images: the demo reads text only")
def test_image_is_refused(client: openai.OpenAI) -> None:
    image = {"type": "image_url", "image_url": {"url": PIXEL}}
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, [{"role": "user", "content": [image]}])
    assert "image_url" in caught.value.message


@pytest.mark.refused("audio output")
def test_audio_output_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, modalities=["text", "audio"], audio={"voice": "alloy", "format": "wav"})
    assert caught.value.code == "unsupported"


@pytest.mark.refused("web search: servers of OpenAI run it")
def test_web_search_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, web_search_options={})
    assert caught.value.code == "unsupported"


@pytest.mark.refused("best_of larger than n: no beam search")
def test_best_of_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="demo", prompt="a", best_of=3)
    assert caught.value.param == "best_of"


@pytest.mark.refused("embeddings: there is no embedding model")
def test_embeddings_are_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="demo", input="a")
