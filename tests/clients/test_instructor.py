"""instructor: Pydantic models from chats and from the Responses API, in each of its modes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import instructor
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field
from running_server import Server

CLIENT = "instructor"
EXTRACT: Any = [
    {"role": "user", "content": "Extract name and city as JSON: Maria lives in Lisbon."}
]
SUM: Any = [{"role": "user", "content": "What is 23 + 45?"}]
WEATHER: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
MARIA = ("Maria", "Lisbon")
# In these modes a grammar holds the answer to the schema, so that the demo answers exactly.
HELD = (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA)
MODES = (*HELD, instructor.Mode.JSON, instructor.Mode.MD_JSON)


class Person(BaseModel):
    """A person."""

    name: str
    city: str


class Verdict(BaseModel):
    """A verdict."""

    model_config = ConfigDict(extra="forbid")

    label: Literal["good", "bad"]
    is_final: bool


class Verdicts(BaseModel):
    """One or two verdicts."""

    model_config = ConfigDict(extra="forbid")

    items: list[Verdict] = Field(min_length=1, max_length=2)


class get_weather(BaseModel):  # noqa: N801 - the name of the tool
    """Get the weather in a city."""

    city: str


def connect(server: Server, mode: Any) -> Any:
    client = openai.OpenAI(base_url=server.v1, api_key=server.key, max_retries=0)
    return instructor.from_openai(client, mode=mode)


def ask(client: Any, model: Any, messages: Any = EXTRACT, **options: Any) -> Any:
    defaults = {"model": "demo", "temperature": 0, "max_tokens": 300, "max_retries": 0}
    return client.chat.completions.create(
        response_model=model, messages=messages, **{**defaults, **options}
    )


@pytest.fixture(params=HELD, ids=lambda mode: mode.name)
def client(server: Server, request: pytest.FixtureRequest) -> Any:
    return connect(server, request.param)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_model_is_extracted(server: Server, mode: Any) -> None:
    found = ask(connect(server, mode), Person)
    assert isinstance(found, Person)


def test_enumeration_and_boolean_are_held(client: Any) -> None:
    assert isinstance(ask(client, Verdict, SUM), Verdict)


def test_completion_is_returned_with_the_model(client: Any) -> None:
    found, completion = client.chat.completions.create_with_completion(
        response_model=Person, messages=EXTRACT, model="demo", temperature=0, max_retries=0
    )
    assert isinstance(found, Person)
    assert completion.usage.completion_tokens > 0


def test_partial_models_stream(client: Any) -> None:
    *_, last = client.chat.completions.create_partial(
        response_model=Person, messages=EXTRACT, model="demo", temperature=0, max_retries=0
    )
    assert last.name is not None
    assert last.city is not None


def test_partial_list_streams(client: Any) -> None:
    *_, last = client.chat.completions.create_partial(
        response_model=Verdicts, messages=SUM, model="demo", temperature=0, max_retries=0
    )
    assert last.items


def test_parallel_tools_are_parsed(server: Server) -> None:
    client = connect(server, instructor.Mode.PARALLEL_TOOLS)
    found = ask(client, Iterable[get_weather], WEATHER)
    assert next(iter(found)).city == "Paris"


def test_response_is_parsed(server: Server) -> None:
    client = connect(server, instructor.Mode.RESPONSES_TOOLS)
    found = client.responses.create(
        input=EXTRACT[0]["content"], response_model=Person, model="demo", max_retries=0
    )
    assert isinstance(found, Person)


async def test_async_model_is_extracted(server: Server) -> None:
    async with openai.AsyncOpenAI(base_url=server.v1, api_key=server.key) as plain:
        client = instructor.from_openai(plain, mode=instructor.Mode.JSON_SCHEMA)
        found = await ask(client, Person)
    assert (found.name, found.city) == MARIA


def test_provider_by_name_answers(server: Server) -> None:
    client = instructor.from_provider(
        "openai/demo", base_url=server.v1, api_key=server.key, mode=instructor.Mode.JSON_SCHEMA
    )
    found = client.create(response_model=Person, messages=EXTRACT, temperature=0)
    assert (found.name, found.city) == MARIA


def test_no_model_gives_the_completion(server: Server) -> None:
    completion = ask(connect(server, instructor.Mode.JSON_SCHEMA), None, SUM)
    assert "68" in completion.choices[0].message.content


def test_wrong_key_is_refused(server: Server) -> None:
    client = connect(Server(server.url, "wrong"), instructor.Mode.TOOLS)
    with pytest.raises(Exception, match="401"):
        ask(client, Person)


@pytest.mark.refused("images: the demo reads text only")
def test_image_is_refused(server: Server) -> None:
    client = connect(server, instructor.Mode.JSON_SCHEMA)
    content = ["What?", instructor.Image.from_url("https://example.com/a.png")]
    with pytest.raises(Exception, match="image_url"):
        ask(client, Person, [{"role": "user", "content": content}])
