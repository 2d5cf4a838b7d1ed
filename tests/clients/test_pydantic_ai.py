"""pydantic-ai: agents over chat completions, the Responses API and Anthropic's Messages API."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel
from pydantic_ai import Agent, ImageUrl, ModelHTTPError, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.messages import ThinkingPart
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from running_server import Server

CLIENT = "pydantic-ai-slim"
SUM = "What is 23 + 45?"
WEATHER = "What is the weather in Paris?"
EXTRACT = "Extract name and city as JSON: Maria lives in Lisbon."


class Person(BaseModel):
    name: str
    city: str


def chat_model(server: Server, name: str = "demo") -> Any:
    return OpenAIChatModel(name, provider=OpenAIProvider(base_url=server.v1, api_key=server.key))


def messages_model(server: Server) -> Any:
    from anthropic import AsyncAnthropic

    client = AsyncAnthropic(base_url=server.url, api_key=server.key)
    return AnthropicModel("demo", provider=AnthropicProvider(anthropic_client=client))


def responses_model(server: Server) -> Any:
    provider = OpenAIProvider(base_url=server.v1, api_key=server.key)
    return OpenAIResponsesModel("demo", provider=provider)


MODELS = {"chat": chat_model, "responses": responses_model, "messages": messages_model}


@pytest.fixture(params=list(MODELS))
def model(server: Server, request: pytest.FixtureRequest) -> Any:
    return MODELS[request.param](server)


def agent(model: Any, **options: Any) -> Any:
    return Agent(model, model_settings={"max_tokens": 400}, **options)


async def test_agent_answers(model: Any) -> None:
    result = await agent(model).run(SUM)
    assert "68" in result.output
    assert result.usage.output_tokens > 0


async def test_agent_streams(model: Any) -> None:
    async with agent(model).run_stream(SUM) as result:
        texts = [text async for text in result.stream_text(delta=True)]
    assert "68" in "".join(texts)


async def test_agent_runs_tools(model: Any) -> None:
    asking = agent(model)
    cities = []

    @asking.tool_plain
    def get_weather(city: str) -> dict[str, Any]:
        """Get the weather in a city."""
        cities.append(city)
        return {"temperature": 21}

    result = await asking.run(WEATHER)
    assert cities == ["Paris"]
    assert "21" in result.output


async def test_conversation_continues(model: Any) -> None:
    asking = agent(model)
    first = await asking.run("My name is Maria.")
    second = await asking.run("What is my name?", message_history=first.all_messages())
    assert "Maria" in second.output


async def test_output_by_forced_tool(model: Any) -> None:
    result = await agent(model, output_type=ToolOutput(Person), retries=3).run(EXTRACT)
    assert isinstance(result.output, Person)


async def test_output_by_schema(server: Server) -> None:
    result = await agent(chat_model(server), output_type=NativeOutput(Person)).run(EXTRACT)
    assert result.output == Person(name="Maria", city="Lisbon")


async def test_output_by_prompt_is_json(server: Server) -> None:
    result = await agent(chat_model(server), output_type=PromptedOutput(Person), retries=3).run(
        EXTRACT
    )
    assert isinstance(result.output, Person)


async def test_structured_output_streams(server: Server) -> None:
    asking = agent(chat_model(server), output_type=NativeOutput(Person))
    async with asking.run_stream(EXTRACT) as result:
        assert await result.get_output() == Person(name="Maria", city="Lisbon")


async def test_thinking_is_a_part(server: Server) -> None:
    result = await agent(chat_model(server)).run(SUM)
    parts = result.new_messages()[-1].parts
    assert any(isinstance(part, ThinkingPart) and "carry" in part.content for part in parts)


def test_agent_runs_without_asyncio(model: Any) -> None:
    assert "68" in agent(model).run_sync(SUM, model_settings={"temperature": 0}).output


async def test_settings_are_accepted(server: Server) -> None:
    settings = {
        "temperature": 0.1,
        "top_p": 0.9,
        "seed": 3,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.1,
        "stop_sequences": ["%%"],
        "parallel_tool_calls": False,
        "logit_bias": {"5": -1},
        "openai_reasoning_effort": "low",
        "openai_user": "ann",
    }
    assert (await agent(chat_model(server)).run(SUM, model_settings=settings)).output


async def test_wrong_model_is_an_http_error(server: Server) -> None:
    with pytest.raises(ModelHTTPError) as caught:
        await agent(chat_model(server, "gpt-9")).run(SUM)
    assert caught.value.status_code == 404


@pytest.mark.refused("images: the demo reads text only")
async def test_image_is_refused(server: Server) -> None:
    with pytest.raises(ModelHTTPError) as caught:
        await agent(chat_model(server)).run(["What?", ImageUrl("https://example.com/a.png")])
    assert caught.value.status_code == 400
