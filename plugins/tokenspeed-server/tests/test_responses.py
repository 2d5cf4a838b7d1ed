"""The Responses API, through OpenAI's own client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest
from openai.types.responses import Response
from scripted import http, leave_early, run, scripted, serving

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TOOLS: Any = [
    {
        "type": "function",
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        "strict": None,
    }
]
THINKS = "<think>\nI need the weather.\n</think>\n\n"


def kinds(response: Response) -> list[str]:
    return [item.type for item in response.output]


def test_response_has_text_usage_and_parameters() -> None:
    async def test() -> None:
        async with serving("Sunny.") as (client, engine):
            answer = await client.responses.create(
                model="fake",
                input="Weather?",
                instructions="Be short.",
                max_output_tokens=100,
                temperature=0,
                metadata={"a": "b"},
            )
            assert answer.output_text == "Sunny."
            assert (answer.status, answer.error, answer.incomplete_details) == (
                "completed",
                None,
                None,
            )
            assert answer.instructions == "Be short."
            assert answer.metadata == {"a": "b"}
            assert answer.usage is not None
            submit = engine.submitted[0]
            assert answer.usage.input_tokens == len(submit.prompt)
            assert answer.usage.input_tokens_details.cached_tokens == len(submit.prompt) - 1
            assert answer.usage.total_tokens == len(submit.prompt) + answer.usage.output_tokens
            assert (submit.temperature, submit.max_tokens) == (0, 100)
            assert engine.messages() == [
                {"role": "system", "content": "Be short."},
                {"role": "user", "content": "Weather?"},
            ]

    run(test)


@pytest.mark.parametrize("reply", ["It is sunny, é 🙂.", f"{THINKS}Let me look.\n{CALL}\n{CALL}"])
def test_stream_adds_up_to_the_whole_response(reply: str) -> None:
    async def test() -> None:
        async with serving(reply) as (client, _):
            ask: Any = {"model": "fake", "input": "Weather?", "tools": TOOLS}
            whole = await client.responses.create(**ask)
            async with client.responses.stream(**ask) as stream:
                events = [event async for event in stream]
                final = await stream.get_final_response()
            assert kinds(final) == kinds(whole)
            assert final.output_text == whole.output_text
            assert final.usage == whole.usage
            texts = [e.delta for e in events if e.type == "response.output_text.delta"]
            assert "".join(texts) == whole.output_text
            calls = [item for item in final.output if item.type == "function_call"]
            for call in calls:
                assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Paris"})
                assert call.status == "completed"
            assert len({call.call_id for call in calls}) == len(calls) == reply.count(CALL)

    run(test)


def test_events_follow_the_published_sequence() -> None:
    async def test() -> None:
        async with serving(f"{THINKS}Let me look.{CALL}") as (client, _):
            stream = await client.responses.create(
                model="fake", input="Weather?", tools=TOOLS, stream=True
            )
            events: list[Any] = [event async for event in stream]
            names = [event.type.removeprefix("response.") for event in events]
            assert [event.sequence_number for event in events] == list(range(len(events)))
            assert names[:2] == ["created", "in_progress"]
            assert names[-1] == "completed"
            for kind, starts, ends in (
                (
                    "reasoning_text",
                    ["output_item.added", "content_part.added"],
                    ["reasoning_text.done", "content_part.done", "output_item.done"],
                ),
                (
                    "output_text",
                    ["output_item.added", "content_part.added"],
                    ["output_text.done", "content_part.done", "output_item.done"],
                ),
                (
                    "function_call_arguments",
                    ["output_item.added"],
                    ["function_call_arguments.done", "output_item.done"],
                ),
            ):
                deltas = [i for i, name in enumerate(names) if name == f"{kind}.delta"]
                assert deltas == list(range(deltas[0], deltas[-1] + 1))
                assert names[deltas[0] - len(starts) : deltas[0]] == starts
                assert names[deltas[-1] + 1 : deltas[-1] + 1 + len(ends)] == ends
                done = events[deltas[-1] + 1]
                joined = "".join(events[i].delta for i in deltas)
                assert joined == getattr(done, "text", None) or joined == done.arguments
            items = [event.item for event in events if event.type.endswith("output_item.done")]
            assert [item.to_dict() for item in items] == [
                item.to_dict() for item in events[-1].response.output
            ]

    run(test)


def test_reasoning_tokens_are_counted() -> None:
    async def test() -> None:
        async with serving(f"{THINKS}Sunny.") as (client, _):
            answer = await client.responses.create(model="fake", input="Weather?")
            assert kinds(answer) == ["reasoning", "message"]
            assert answer.usage is not None
            num_reasoning = answer.usage.output_tokens_details.reasoning_tokens
            assert 5 < num_reasoning < answer.usage.output_tokens - 3

    run(test)


def test_reasoning_tokens_do_not_depend_on_the_tokens_of_a_step() -> None:
    async def test() -> None:
        counts = set()
        for step_size in (1, 4, 1000):
            async with serving(f"{THINKS}Sunny.") as (client, engine):
                engine.step_size = step_size
                answer = await client.responses.create(model="fake", input="Weather?")
                assert answer.usage is not None
                counts.add(answer.usage.output_tokens_details.reasoning_tokens)
        assert len(counts) == 1

    run(test)


def test_tool_round_trip_reaches_the_template() -> None:
    async def test() -> None:
        async with serving(f"{THINKS}{CALL}", "Sunny.") as (client, engine):
            ask: Any = {"model": "fake", "tools": TOOLS, "store": False}
            first = await client.responses.create(input="Weather?", **ask)
            call = next(item for item in first.output if item.type == "function_call")
            items: Any = [
                {"role": "user", "content": "Weather?"},
                *(item.to_dict() for item in first.output),
                {"type": "function_call_output", "call_id": call.call_id, "output": "20 degrees"},
            ]
            second = await client.responses.create(input=items, **ask)
            assert second.output_text == "Sunny."
            user, assistant, tool = engine.messages()
            assert user["content"] == "Weather?"
            assert assistant["reasoning_content"].strip() == "I need the weather."
            assert assistant["tool_calls"][0]["function"] == {
                "name": "get_weather",
                "arguments": {"city": "Paris"},
            }
            assert (tool["role"], tool["tool_call_id"]) == ("tool", call.call_id)
            assert engine.tools()[0]["function"]["parameters"] == TOOLS[0]["parameters"]

    run(test)


def test_previous_response_continues_the_conversation() -> None:
    async def test() -> None:
        async with serving("One.", "Two.", "Three.") as (client, engine):
            first = await client.responses.create(model="fake", input="1", instructions="Count.")
            second = await client.responses.create(
                model="fake",
                input=[{"role": "user", "content": [{"type": "input_text", "text": "2"}]}],
                previous_response_id=first.id,
            )
            third = await client.responses.create(
                model="fake", input="3", previous_response_id=second.id, stream=True
            )
            async for event in third:
                last = event
            assert last.type == "response.completed"
            assert [(each["role"], each["content"]) for each in engine.messages()] == [
                ("user", "1"),
                ("assistant", "One."),
                ("user", "2"),
                ("assistant", "Two."),
                ("user", "3"),
            ], "instructions are not inherited"
            stored = await client.responses.retrieve(last.response.id)
            assert stored.to_dict() == last.response.to_dict()
            await client.responses.delete(first.id)
            for unknown in (first.id, second.id, "resp_none"):
                with pytest.raises(openai.BadRequestError) as caught:
                    await client.responses.create(
                        model="fake", input="4", previous_response_id=unknown
                    )
                assert caught.value.code == "previous_response_not_found"

    run(test)


def test_stored_response_lists_its_input_items() -> None:
    async def test() -> None:
        async with serving("Fine.") as (client, _):
            items: Any = [{"role": "user", "content": str(number)} for number in range(5)]
            answer = await client.responses.create(model="fake", input=items)
            found = [item async for item in client.responses.input_items.list(answer.id, limit=2)]
            texts: Any = [item.to_dict()["content"] for item in found]
            assert [content[0]["text"] for content in texts] == ["4", "3", "2", "1", "0"]
            first = await client.responses.input_items.list(answer.id, order="asc", limit=2)
            assert first.has_more
            assert first.data[0].to_dict()["content"][0]["text"] == "0"  # type: ignore[index]
            with pytest.raises(openai.BadRequestError):
                await client.responses.input_items.list(answer.id, limit=1000)

    run(test)


def test_unstored_deleted_and_unknown_responses_are_not_found() -> None:
    async def test() -> None:
        async with serving() as (client, _):
            unstored = await client.responses.create(model="fake", input="a", store=False)
            stored = await client.responses.create(model="fake", input="a")
            await client.responses.delete(stored.id)
            for name in (unstored.id, stored.id, "resp_none"):
                for ask in (
                    client.responses.retrieve,
                    client.responses.delete,
                    client.responses.cancel,
                    client.responses.input_items.list,
                ):
                    with pytest.raises(openai.NotFoundError):
                        await ask(name)

    run(test)


def test_only_background_responses_can_be_cancelled() -> None:
    async def test() -> None:
        async with serving() as (client, _):
            answer = await client.responses.create(model="fake", input="a")
            with pytest.raises(openai.BadRequestError):
                await client.responses.cancel(answer.id)

    run(test)


def test_response_that_the_client_left_is_not_stored() -> None:
    async def test() -> None:
        with scripted("A long story.") as (app, engine):
            sent = await leave_early(app, engine, "/v1/responses", {"input": "a", "stream": True})
            assert b"response.completed" not in sent
            name = json.loads(sent.split(b"data: ")[1].split(b"\n")[0])["response"]["id"]
            async with http(app) as client:
                assert (await client.get(f"/v1/responses/{name}")).status_code == 404

    run(test)


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "name": "get_weather"},
        {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "get_weather"}],
        },
        "auto",
    ],
)
def test_forced_calls_constrain_the_reply(choice: Any) -> None:
    async def test() -> None:
        async with serving(CALL) as (client, engine):
            answer = await client.responses.create(
                model="fake", input="a", tools=TOOLS, tool_choice=choice
            )
            assert kinds(answer) == ["function_call"]
            assert answer.to_dict()["tool_choice"] == choice
            assert (engine.submitted[0].grammar is not None) == (choice != "auto")

    run(test)


class Sum(pydantic.BaseModel):
    """A structured answer."""

    total: int


def test_parsed_output_is_held_to_its_schema() -> None:
    async def test() -> None:
        async with serving('{"total": 5}') as (client, engine):
            answer = await client.responses.parse(model="fake", input="2+3", text_format=Sum)
            assert answer.output_parsed == Sum(total=5)
            assert engine.submitted[0].grammar is not None

    run(test)


def test_cut_answers_are_incomplete() -> None:
    async def test() -> None:
        async with serving(CALL) as (client, _):
            ask: Any = {"model": "fake", "input": "a", "tools": TOOLS, "max_output_tokens": 40}
            whole = await client.responses.create(**ask)
            async with client.responses.stream(**ask) as stream:
                names = [event.type async for event in stream]
            assert names[-1] == "response.incomplete"
            assert whole.status == "incomplete"
            assert whole.incomplete_details is not None
            assert whole.incomplete_details.reason == "max_output_tokens"
            assert whole.output[-1].to_dict()["status"] == "incomplete"

    run(test)


@pytest.mark.parametrize(
    "change",
    [
        {"input": []},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        {"input": [{"type": "item_reference", "id": "x"}]},
        {"tools": [{"type": "web_search"}]},
        {"tool_choice": {"type": "function", "name": "other"}},
        {"background": True},
        {"conversation": "conv_1"},
        {"truncation": "auto"},
        {"max_tool_calls": 3},
        {"temperature": -1},
        {"max_output_tokens": 0},
    ],
)
def test_wrong_and_unsupported_fields_are_refused(change: Any) -> None:
    async def test() -> None:
        async with serving() as (client, engine):
            with pytest.raises(openai.BadRequestError) as caught:
                await client.responses.create(**{"model": "fake", "input": "a", **change})
            assert not engine.submitted
            name = next(iter(change))
            assert (caught.value.param or "").startswith(name)

    run(test)


def test_keys_do_not_see_responses_of_each_other() -> None:
    async def test() -> None:
        async with serving(api_key="secret,other") as (client, _):
            mine = await client.responses.create(model="fake", input="a")
            other = client.with_options(api_key="other")
            with pytest.raises(openai.NotFoundError):
                await other.responses.retrieve(mine.id)
            with pytest.raises(openai.BadRequestError):
                await other.responses.create(model="fake", input="b", previous_response_id=mine.id)
            assert (await client.responses.retrieve(mine.id)).id == mine.id

    run(test)


def test_workers_share_stored_responses(tmp_path: Path) -> None:
    async def test() -> None:
        shared = {"response_store": tmp_path / "store"}
        async with serving("One.", **shared) as (first, _), serving(**shared) as (second, engine):
            answer = await first.responses.create(model="fake", input="a")
            assert (await second.responses.retrieve(answer.id)).output_text == "One."
            await second.responses.create(model="fake", input="b", previous_response_id=answer.id)
            assert [each["content"] for each in engine.messages()] == ["a", "One.", "b"]

    run(test)


def test_text_comes_with_logprobs_on_request() -> None:
    async def test() -> None:
        async with serving("Sunny.") as (client, engine):
            ask: Any = {
                "model": "fake",
                "input": "a",
                "top_logprobs": 2,
                "include": ["message.output_text.logprobs"],
            }
            whole = await client.responses.create(**ask)
            async with client.responses.stream(**ask) as stream:
                deltas: Any = [e async for e in stream if e.type.endswith("text.delta")]
                final = await stream.get_final_response()
            assert engine.submitted[0].logprobs == 2
            for answer in (whole, final):
                content: Any = answer.output[0].to_dict()["content"]
                entries = content[0]["logprobs"]
                assert "".join(entry["token"] for entry in entries).startswith("Sunny.")
                assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
            assert sum(len(delta.logprobs) for delta in deltas) == len(entries)

    run(test)
