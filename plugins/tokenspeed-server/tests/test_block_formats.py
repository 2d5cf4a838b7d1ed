"""Formats with typed blocks: streams add up to whole answers, for any deltas of a reply."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import TOKENIZER
from tokenspeed_server.anthropic.format import MessagesFormat
from tokenspeed_server.formats import Answer, ResponseFormat, Usage
from tokenspeed_server.parser_chain import Delta
from tokenspeed_server.responses_api.format import ResponsesFormat
from tokenspeed_server.responses_api.protocol import ResponsesRequest

texts = st.text(min_size=1, max_size=5)


@st.composite
def replies(draw: st.DrawFn) -> list[Delta]:
    """Return the deltas of a reply: text, reasoning and calls in any order."""
    deltas: list[Delta] = []
    for kind in draw(st.lists(st.sampled_from(["text", "reasoning", "call"]), max_size=6)):
        if kind == "text":
            deltas += draw(st.lists(texts, min_size=1, max_size=4))
        elif kind == "reasoning":
            deltas += [
                {"reasoning_content": each}
                for each in draw(st.lists(texts, min_size=1, max_size=4))
            ]
        else:
            function = {"name": draw(st.sampled_from(["f", "g"])), "arguments": ""}
            call = {"index": 0, "id": f"call_{len(deltas)}", "type": "function"}
            deltas.append({"tool_calls": [{**call, "function": function}]})
            arguments = json.dumps({"x": draw(st.text(max_size=9))})
            cut = draw(st.integers(0, len(arguments)))
            deltas += [
                {"tool_calls": [{"index": 0, "function": {"arguments": part}}]}
                for part in (arguments[:cut], arguments[cut:])
            ]
    return deltas


def events(made: ResponseFormat, deltas: Sequence[Delta], answer: Answer) -> list[dict[str, Any]]:
    usage = Usage(3, 4, 0)
    body = b"".join(made.event(0, delta, None, {}) for delta in deltas)
    data = made.opening(1, usage) + body + made.closing([answer], usage)
    lines = [line for line in data.decode().split("\n") if line.startswith("data: ")]
    return [json.loads(line[6:]) for line in lines]


@settings(max_examples=100, deadline=None)
@given(deltas=replies())
def test_streamed_blocks_add_up_to_the_message(deltas: list[Delta]) -> None:
    answer = Answer(deltas=deltas, finish_reason="stop")
    whole = json.loads(MessagesFormat("m").body([answer], Usage(3, 4, 0), False, False))
    blocks: list[dict[str, Any]] = []
    is_open = False
    for event in events(MessagesFormat("m"), deltas, answer):
        match event["type"]:
            case "content_block_start":
                assert not is_open
                assert event["index"] == len(blocks)
                blocks.append({**event["content_block"], "input_text": ""})
                is_open = True
            case "content_block_delta":
                delta = event["delta"]
                kind = delta.pop("type").removesuffix("_delta")
                name = {"input_json": "input_text"}.get(kind, kind)
                (value,) = delta.values()
                blocks[event["index"]][name] += value
            case "content_block_stop":
                is_open = False
    assert not is_open
    for block in blocks:
        arguments = block.pop("input_text")
        if block["type"] == "tool_use":
            block["input"] = json.loads(arguments)
    for block in (*blocks, *whole["content"]):
        block.pop("signature", None)
    assert blocks == whole["content"]


def responses_format(stream: bool, ended: list[bytes]) -> ResponsesFormat:
    body = ResponsesRequest(input="a", stream=stream)
    return ResponsesFormat("resp_1", body, "m", TOKENIZER, Usage(3, 4, 0), ended.append)


@settings(max_examples=100, deadline=None)
@given(deltas=replies(), is_cut=st.booleans())
def test_streamed_items_add_up_to_the_response(deltas: list[Delta], is_cut: bool) -> None:
    answer = Answer(finish_reason="length" if is_cut else "stop")
    ended: list[bytes] = []
    made = responses_format(False, ended)
    assert not any(made.event(0, delta, None, {}) for delta in deltas)
    whole = made.body([answer], Usage(3, 4, 0), False, False)
    found = events(responses_format(True, ended), deltas, answer)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert ended[0] == whole
    assert json.loads(ended[1]) == found[-1]["response"]
    items = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert items == found[-1]["response"]["output"]
    joined: dict[str, str] = {}
    for event in found:
        if event["type"].endswith(".delta"):
            joined[event["item_id"]] = joined.get(event["item_id"], "") + event["delta"]
    contents = [
        item["arguments"] if "arguments" in item else item["content"][0]["text"] for item in items
    ]
    assert contents == [joined.get(item["id"], "") for item in items]
    for item, other in zip(items, json.loads(whole)["output"], strict=True):
        assert {**item, "id": ""} == {**other, "id": ""}
