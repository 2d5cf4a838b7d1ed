"""smolagents: its OpenAI model, and agents with tools."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from running_server import Server
from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool

CLIENT = "smolagents"
SUM: Any = [{"role": "user", "content": [{"type": "text", "text": "What is 23 + 45?"}]}]
WEATHER: Any = [
    {"role": "user", "content": [{"type": "text", "text": "What is the weather in Paris?"}]}
]
SCHEMA: Any = {
    "type": "json_schema",
    "json_schema": {
        "name": "person",
        "schema": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "city": {"type": "string"}},
            "required": ["name", "city"],
            "additionalProperties": False,
        },
    },
}


@tool
def get_weather(city: str) -> str:
    """Get the weather in a city.

    Args:
        city: Name of the city.
    """
    return f"21 degrees in {city}"


def connect(server: Server, **options: Any) -> Any:
    defaults: dict[str, Any] = {"model_id": "demo", "temperature": 0, "max_tokens": 300}
    return OpenAIServerModel(
        api_base=server.v1,
        api_key=server.key,
        client_kwargs={"max_retries": 0},
        **{**defaults, **options},
    )


@pytest.fixture
def model(server: Server) -> Any:
    return connect(server)


def test_model_answers(model: Any) -> None:
    answer = model.generate(SUM)
    assert "68" in answer.content
    assert answer.token_usage.output_tokens > 0


def test_model_streams(model: Any) -> None:
    deltas = list(model.generate_stream(SUM))
    assert "68" in "".join(delta.content or "" for delta in deltas)
    assert any(delta.token_usage for delta in deltas)


def test_flat_messages_are_accepted(server: Server) -> None:
    assert "68" in connect(server, flatten_messages_as_text=True).generate(SUM).content


def test_stop_sequences_end_text(model: Any) -> None:
    assert "=" not in model.generate(SUM, stop_sequences=["="]).content


def test_tool_is_called(model: Any) -> None:
    answer = model.generate(WEATHER, tools_to_call_from=[get_weather])
    call = answer.tool_calls[0]
    assert call.function.name == "get_weather"
    arguments = call.function.arguments
    assert set(json.loads(arguments) if isinstance(arguments, str) else arguments) == {"city"}


def test_tool_call_streams(model: Any) -> None:
    deltas = list(model.generate_stream(WEATHER, tools_to_call_from=[get_weather]))
    parts = [call.function.arguments for delta in deltas for call in delta.tool_calls or []]
    assert set(json.loads("".join(part or "" for part in parts))) == {"city"}


def test_structured_output_is_json(model: Any) -> None:
    content = [{"type": "text", "text": "Extract name and city as JSON: Maria lives in Lisbon."}]
    answer = model.generate([{"role": "user", "content": content}], response_format=SCHEMA)
    assert json.loads(answer.content) == {"name": "Maria", "city": "Lisbon"}


@pytest.mark.parametrize("is_streamed", [False, True])
def test_agent_runs_its_tool(model: Any, is_streamed: bool) -> None:
    """The demo may call any of the tools: `tool_choice` is required in each step."""
    agent = ToolCallingAgent(
        tools=[get_weather],
        model=model,
        max_steps=2,
        stream_outputs=is_streamed,
        verbosity_level=0,
        instructions="Be brief.",
    )
    agent.prompt_templates["system_prompt"] = "You are brief."
    result = agent.run("What is the weather in Paris?", return_full_result=True)
    names = [
        call["function"]["name"] for step in result.steps for call in step.get("tool_calls") or []
    ]
    assert set(names) <= {"get_weather", "final_answer"}
    assert names


def test_code_agent_sends_its_format(model: Any) -> None:
    """The demo writes no programs: the run ends at its limit of steps, without an error of the server."""
    agent = CodeAgent(
        tools=[],
        model=model,
        max_steps=1,
        verbosity_level=0,
        use_structured_outputs_internally=True,
    )
    agent.prompt_templates["system_prompt"] = "You are brief."
    result = agent.run("What is 23 + 45?", return_full_result=True)
    assert result.token_usage.output_tokens > 0


def test_wrong_key_is_refused(server: Server) -> None:
    with pytest.raises(openai.AuthenticationError):
        connect(Server(server.url, "wrong")).generate(SUM)


def test_wrong_model_is_not_found(server: Server) -> None:
    with pytest.raises(openai.NotFoundError):
        connect(server, model_id="gpt-9").generate(SUM)


@pytest.mark.refused("images: the demo reads text only")
def test_image_is_refused(model: Any) -> None:
    image = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    with pytest.raises(openai.BadRequestError) as caught:
        model.generate([{"role": "user", "content": [image]}])
    assert "image_url" in caught.value.message
