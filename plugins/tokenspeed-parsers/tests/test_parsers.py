"""What each parser makes of replies, as they should be and as they should not, however they are cut."""

from __future__ import annotations

import itertools
import json
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenspeed_parsers import BASE, DEEPSEEK_R1, JSON, PASSTHROUGH, QWEN3, TAGGED
from tokenspeed_testing.parser import CONTEXT, Parts, joined, read

from tokenspeed_core.api import ParserContext, ParserSpec

ALL = {
    "tagged": TAGGED,
    "json": JSON,
    "passthrough": PASSTHROUGH,
    "base": BASE,
    "qwen3": QWEN3,
    "r1": DEEPSEEK_R1,
}
SHREDS = (
    "<tool_call>",
    "</tool_call>",
    "<tool",
    "_call>",
    "</",
    "<",
    ">",
    "<think>",
    "</think>",
    "<thi",
    "nk>",
    "\n",
    " ",
    '{"name": "f", "arguments": ',
    '{"name": "f", "parameters": {}}',
    '{"arguments": {"a": 1}, "name": "g"}',
    '"}',
    '{"a": "',
    "{",
    "}",
    "}}",
    '"',
    "\\",
    '\\"',
    "\\u00e9",
    "[",
    "]",
    ",",
    ":",
    "f",
    "name",
    "1",
    "é",
    "🙂",
    "Hello.",
)
texts = st.lists(st.sampled_from(SHREDS), max_size=24).map("".join)


def say(spec: ParserSpec, text: str, context: ParserContext = CONTEXT) -> Parts:
    return joined(read(spec, [text] if text else [], context))


def cut(text: str, places: list[int]) -> list[str]:
    return [text[a:b] for a, b in itertools.pairwise([0, *places, len(text)]) if b > a]


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=400, deadline=None)
@given(
    text=texts,
    data=st.data(),
    end=st.sampled_from(["", "<think>\n", "</think>\n\n", "assistant\n"]),
)
def test_result_does_not_depend_on_cuts(
    name: str, text: str, data: st.DataObject, end: str
) -> None:
    context = ParserContext(CONTEXT.tools, end)
    places = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    whole = say(ALL[name], text, context)
    assert joined(read(ALL[name], cut(text, places), context)) == whole
    assert joined(read(ALL[name], list(text), context)) == whole


@settings(max_examples=400, deadline=None)
@given(text=texts)
def test_text_without_calls_is_unchanged(text: str) -> None:
    for spec in (TAGGED, JSON, PASSTHROUGH):
        parts = say(spec, text)
        if all(kind == "content" for kind, _ in parts):
            assert "".join(said for _, said in parts) == text


MARKS = ("<tool_call>", "</tool_call>", "\n")


@settings(max_examples=400, deadline=None)
@given(text=texts)
def test_only_markers_and_braces_are_removed(text: str) -> None:
    """Counted in letters of which neither marks nor the frame of a call have any."""
    parts = say(TAGGED, text)
    said = "".join(json.dumps(said) if kind == "call" else said for kind, said in parts)
    for letter in ("é", "🙂", "H", "1"):
        assert said.count(letter) >= text.count(letter), parts


def without_marks(text: str) -> str:
    """Return a text without marks and blanks, nor the marks that stand there once those within them are gone."""
    while (less := re.sub("</?think>|[ \n]", "", text)) != text:
        text = less
    return text


@settings(max_examples=400, deadline=None)
@example(text="<thi<think>nk>", end="")
@given(text=texts, end=st.sampled_from(["", "<think>"]))
def test_reasoning_removes_only_markers(text: str, end: str) -> None:
    for spec in (BASE, QWEN3, DEEPSEEK_R1):
        said = "".join(said for _, said in say(spec, text, ParserContext((), end)))
        rest = iter(text)
        assert all(letter in rest for letter in said), "said, and not in the text"
        assert without_marks(said) == without_marks(text)


CALL = ("arguments", '{"a": 1}')
TAGGED_REPLIES: list[tuple[str, Parts]] = [
    ('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', [("call", "f"), CALL]),
    (
        '<tool_call>\n{ "name" : "f",\n"parameters": {"a": 1} }\n</tool_call>\n',
        [("call", "f"), CALL],
    ),
    ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', [("call", "f"), CALL]),
    ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [("call", "f"), CALL]),
    ('<tool_call>{"name": "f"}</tool_call>', [("call", "f"), ("arguments", "{}")]),
    (
        'I ask.\n\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n'
        '<tool_call>{"name": "g", "arguments": {}}</tool_call>\nDone.',
        [
            ("content", "I ask."),
            ("call", "f"),
            CALL,
            ("call", "g"),
            ("arguments", "{}"),
            ("content", "Done."),
        ],
    ),
    (
        '<tool_call>{"name": "f", "arguments": {"a": "}</tool_call>\\"{"}}</tool_call>',
        [("call", "f"), ("arguments", '{"a": "}</tool_call>\\"{"}')],
    ),
]
BROKEN_REPLIES: list[tuple[str, Parts]] = [
    ("Write <tool_call> and be done.", [("content", "Write <tool_call> and be done.")]),
    ("\n<tool_call>{bad}</tool_call>\n", [("content", "\n<tool_call>{bad}</tool_call>\n")]),
    (
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        [("content", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>')],
    ),
    (
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        [("content", '<tool_call>{"name": "", "arguments": {}}</tool_call>')],
    ),
    ('<tool_call>{"name": "f", "argu', [("content", '<tool_call>{"name": "f", "argu')]),
    ('<tool_call>{"name": "f", "arguments": {"a": 1}', [("call", "f"), CALL]),
    ('<tool_call>{"name": "f", "arguments": {"a": 1}}\n</tool_c', [("call", "f"), CALL]),
    ('<tool_call>{"name": "f", "arguments": {"a": "x', [("call", "f"), ("arguments", '{"a": "x')]),
    (
        '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>ok',
        [("call", "f"), ("arguments", '{"a": 1'), ("content", "ok")],
    ),
    (
        '<tool_call>{"name": "f", "arguments": {"a": 1}} and more</tool_call>',
        [("call", "f"), CALL, ("content", "} and more")],
    ),
    (
        '<tool_call>{"name": "f", "arguments": {"a": 1}}<tool_call>{"name": "g"}',
        [("call", "f"), CALL, ("call", "g"), ("arguments", "{}")],
    ),
]


@pytest.mark.parametrize(("text", "parts"), [*TAGGED_REPLIES, *BROKEN_REPLIES])
def test_tagged_calls_are_found(text: str, parts: Parts) -> None:
    assert say(TAGGED, text) == parts


def test_arguments_are_streamed() -> None:
    parser = TAGGED.make(CONTEXT)
    parser.feed('<tool_call>{"name": "f", "arguments": ')
    assert [event.kind for event in parser.feed('{"a": "lo')] == ["call", "arguments"]
    assert [event.text for event in parser.feed("ng")] == ["ng"]


@pytest.mark.parametrize(
    ("text", "is_call"),
    [
        ('{"name": "get_weather", "parameters": {"city": "Paris"}}', True),
        ('\n[{"name": "get_weather", "arguments": {}}]', True),
        ('{"name": "delete_all", "parameters": {}}', False),
        ('[{"name": "get_weather", "arguments": {}}, 3]', False),
        ("[]", False),
        ('{"city": "Paris"}', False),
        ('{"name": "get_weather", "parameters": {"ci', False),
        ('The call is {"name": "get_weather", "parameters": {}}', False),
    ],
)
def test_bare_json_needs_offered_tools(text: str, is_call: bool) -> None:
    parts = say(JSON, text)
    assert parts[0] == (("call", "get_weather") if is_call else ("content", text))


@pytest.mark.parametrize(
    ("spec", "end", "text", "parts"),
    [
        (QWEN3, "", "<think>\na\n</think>\n\nb", [("reasoning", "a"), ("content", "b")]),
        (QWEN3, "", "<think>\n\n</think>\n\nb", [("content", "b")]),
        (QWEN3, "", "b", [("content", "b")]),
        (QWEN3, "", "b <think>a</think>", [("content", "b <think>a</think>")]),
        (QWEN3, "", "<think>a</think>b<think>c", [("reasoning", "a"), ("content", "b<think>c")]),
        (QWEN3, "", "<think>a\n\n", [("reasoning", "a\n\n")]),
        (QWEN3, "<think>\n", "a</think>b", [("reasoning", "a"), ("content", "b")]),
        (QWEN3, "<think>\n\n</think>\n\n", "b", [("content", "b")]),
        (QWEN3, "<｜Assistant｜></think>", "b", [("content", "b")]),
        (QWEN3, "what is <think>?\nassistant\n", "b", [("content", "b")]),
        (DEEPSEEK_R1, "", "a</think>b", [("reasoning", "a"), ("content", "b")]),
        (DEEPSEEK_R1, "", "<think>\na</think>b", [("reasoning", "a"), ("content", "b")]),
        (DEEPSEEK_R1, "", "a", [("reasoning", "a")]),
        (DEEPSEEK_R1, "</think>\n\n", "b", [("content", "b")]),
        (
            BASE,
            "",
            "b <think>a</think>c<think>d",
            [("content", "b "), ("reasoning", "a"), ("content", "c"), ("reasoning", "d")],
        ),
    ],
)
def test_reasoning_depends_on_prompt_and_markers(
    spec: ParserSpec, end: str, text: str, parts: Parts
) -> None:
    assert say(spec, text, ParserContext((), end)) == parts
