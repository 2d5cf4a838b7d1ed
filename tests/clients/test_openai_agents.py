"""openai-agents: agents over the Responses API and over chat completions."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    handoff,
)
from openai.types.shared import Reasoning
from pydantic import BaseModel
from running_server import Server

CLIENT = "openai-agents"
SUM = "What is 23 + 45?"
WEATHER = "What is the weather in Paris?"
EXTRACT = "Extract name and city as JSON: Maria lives in Lisbon."
GREEDY = ModelSettings(temperature=0)


class Person(BaseModel):
    name: str
    city: str


@function_tool
def get_weather(city: str) -> str:
    """Get the weather in a city."""
    return json.dumps({"city": city, "temperature": 21})


@pytest.fixture(params=["chat", "responses"])
def model(server: Server, request: pytest.FixtureRequest) -> Any:
    client = openai.AsyncOpenAI(base_url=server.v1, api_key=server.key, max_retries=0)
    kinds = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}
    return kinds[request.param](model="demo", openai_client=client)


def agent(model: Any, **options: Any) -> Any:
    defaults: dict[str, Any] = {"model_settings": GREEDY}
    return Agent(name="demo", model=model, **{**defaults, **options})


async def test_agent_answers(model: Any) -> None:
    result = await Runner.run(agent(model), SUM)
    assert "68" in result.final_output


async def test_agent_streams(model: Any) -> None:
    result = Runner.run_streamed(agent(model), SUM)
    kinds = [event.type async for event in result.stream_events()]
    assert "raw_response_event" in kinds
    assert "68" in result.final_output


async def test_agent_runs_tools(model: Any) -> None:
    result = await Runner.run(agent(model, tools=[get_weather]), WEATHER)
    assert "21" in result.final_output


async def test_agent_runs_tools_while_streaming(model: Any) -> None:
    result = Runner.run_streamed(agent(model, tools=[get_weather]), WEATHER)
    names = [event.name async for event in result.stream_events() if hasattr(event, "name")]
    assert "tool_called" in names
    assert "21" in result.final_output


@pytest.mark.parametrize("choice", ["required", "get_weather"])
async def test_tool_choice_is_forced(model: Any, choice: str) -> None:
    forced = agent(
        model,
        tools=[get_weather],
        model_settings=ModelSettings(temperature=0, tool_choice=choice, parallel_tool_calls=False),
        tool_use_behavior="stop_on_first_tool",
    )
    assert "21" in (await Runner.run(forced, SUM)).final_output


async def test_output_type_is_held(model: Any) -> None:
    result = await Runner.run(agent(model, output_type=Person), EXTRACT)
    assert result.final_output == Person(name="Maria", city="Lisbon")


async def test_session_keeps_conversation(model: Any) -> None:
    session = SQLiteSession("one")
    await Runner.run(agent(model), "My name is Maria.", session=session)
    result = await Runner.run(agent(model), "What is my name?", session=session)
    assert "Maria" in result.final_output


async def test_conversation_continues_by_input_list(model: Any) -> None:
    first = await Runner.run(agent(model), "My name is Maria.")
    items = [*first.to_input_list(), {"role": "user", "content": "What is my name?"}]
    assert "Maria" in (await Runner.run(agent(model), items)).final_output


async def test_handoff_is_a_forced_call(model: Any) -> None:
    other = agent(model, handoff_description="Adds numbers.")
    other.name = "adder"
    first = agent(
        model,
        handoffs=[handoff(other)],
        model_settings=ModelSettings(temperature=0, tool_choice="required"),
    )
    result = await Runner.run(first, SUM)
    assert result.last_agent.name == "adder"


async def test_settings_are_accepted(model: Any) -> None:
    settings = ModelSettings(
        temperature=0,
        top_p=0.9,
        max_tokens=300,
        store=False,
        metadata={"task": "sum"},
        reasoning=Reasoning(effort="low"),
        include_usage=True,
        top_logprobs=2,
        extra_body={"seed": 3},
    )
    result = await Runner.run(agent(model, model_settings=settings), SUM)
    assert "68" in result.final_output
    assert result.context_wrapper.usage.total_tokens > 0


async def test_instructions_are_accepted(model: Any) -> None:
    result = await Runner.run(agent(model, instructions="You are a calculator."), SUM)
    assert result.final_output


async def test_wrong_model_is_not_found(model: Any) -> None:
    model.model = "gpt-9"
    with pytest.raises(openai.NotFoundError):
        await Runner.run(agent(model), SUM)


@pytest.mark.refused("images: the demo reads text only")
async def test_image_is_refused(model: Any) -> None:
    image = {"type": "input_image", "image_url": "https://example.com/a.png", "detail": "auto"}
    with pytest.raises(openai.BadRequestError) as caught:
        await Runner.run(agent(model), [{"role": "user", "content": [image]}])
    assert "image" in caught.value.message
