"""llm: the command, with chat completions and with the Responses API."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from running_server import Server

CLIENT = "llm"
SUM = "What is 23 + 45?"
MODELS = """
- model_id: chat
  model_name: demo
  api_base: {url}
  api_key_name: demo
  supports_schema: true
  supports_tools: true
- model_id: responses
  model_name: demo
  api_base: {url}
  api_key_name: demo
  responses: true
  supports_schema: true
  supports_tools: true
- model_id: completion
  model_name: demo
  api_base: {url}
  api_key_name: demo
  completion: true
- model_id: absent
  model_name: gpt-9
  api_base: {url}
  api_key_name: demo
"""
WEATHER = '''
def get_weather(city: str) -> str:
    """Get the weather in a city."""
    return '{"city": "' + city + '", "temperature": 21}'
'''


@pytest.fixture
def home(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the files in which llm keeps models and keys."""
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    (tmp_path / "extra-openai-models.yaml").write_text(MODELS.format(url=server.v1))
    (tmp_path / "keys.json").write_text(json.dumps({"demo": server.key}))
    return tmp_path


@pytest.fixture(params=["chat", "responses"])
def model(home: Path, request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def llm(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "llm", *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL if "input" not in options else None,
        **options,
    )


def output(*arguments: str, **options: Any) -> str:
    done = llm(*arguments, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_prompt_is_answered(model: str) -> None:
    assert "68" in output("-m", model, SUM)


def test_prompt_is_answered_at_once(model: str) -> None:
    assert "68" in output("-m", model, "--no-stream", SUM)


def test_prompt_comes_from_stdin(model: str) -> None:
    assert "68" in output("-m", model, input=SUM)


def test_system_prompt_and_options(model: str) -> None:
    options = [("temperature", "0"), ("top_p", "0.9"), ("max_tokens", "300")]
    flags = [part for name, value in options for part in ("-o", name, value)]
    assert "68" in output("-m", model, "-s", "Be brief.", *flags, SUM)


def test_conversation_continues(model: str) -> None:
    output("-m", model, "My name is Maria.")
    assert "Maria" in output("-c", "What is my name?")


def test_schema_holds_the_answer(model: str) -> None:
    text = output(
        "-m",
        model,
        "--schema",
        "name, city",
        "Extract name and city as JSON: Maria lives in Lisbon.",
    )
    assert json.loads(text) == {"name": "Maria", "city": "Lisbon"}


def test_tool_is_run(model: str) -> None:
    text = output("-m", model, "--functions", WEATHER, "--td", "What is the weather in Paris?")
    assert "21" in text


def test_usage_is_logged(model: str) -> None:
    output("-m", model, SUM)
    (logged,) = json.loads(output("logs", "--json"))
    assert logged["input_tokens"] > 0
    assert logged["output_tokens"] > 0


def test_completion_continues_text(home: Path) -> None:
    assert output("-m", "completion", "-o", "max_tokens", "4", "one two").strip()


def test_wrong_key_is_named(home: Path) -> None:
    done = llm("-m", "chat", "--key", "wrong", SUM)
    assert done.returncode == 1
    assert "API key" in done.stderr


def test_wrong_model_is_named(home: Path) -> None:
    done = llm("-m", "absent", SUM)
    assert done.returncode == 1
    assert "gpt-9" in done.stderr
