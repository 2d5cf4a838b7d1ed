"""Conversations of Python programs, as chat templates get them."""

from __future__ import annotations

from typing import Any

import pytest

from tokenspeed_core.errors import BadRequestError
from tokenspeed_core.text import ChatTemplate, read_conversation, read_conversations

PLAIN = ChatTemplate("{{ messages }}", {})
USER = {"role": "user", "content": "hi"}


def test_text_is_a_message_of_the_user() -> None:
    assert read_conversation("hi", PLAIN) == [USER]


def test_one_conversation_or_several() -> None:
    assert read_conversations([USER], PLAIN) == [[USER]]
    assert read_conversations(["hi", [USER]], PLAIN) == [[USER], [USER]]


def test_content_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert read_conversation([{"role": "user", "content": parts}], PLAIN)[0]["content"] == "a\nb"


def test_openai_message_is_accepted_as_dumped() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    dumped = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "audio": None,
        "tool_calls": [call],
    }
    (message,) = read_conversation([dumped], PLAIN)
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
    assert message.keys() == {"role", "content", "tool_calls"}


def test_developer_becomes_system_unless_the_template_knows_it() -> None:
    given = [{"role": "developer", "content": "be brief"}]
    assert read_conversation(given, PLAIN)[0]["role"] == "system"
    knows = ChatTemplate("{% if messages[0].role == 'developer' %}d{% endif %}", {})
    assert read_conversation(given, knows)[0]["role"] == "developer"


def test_keys_of_the_template_are_allowed() -> None:
    given = [{**USER, "mood": "calm"}]
    assert read_conversation(given, ChatTemplate("{{ messages[0].mood }}", {})) == given
    with pytest.raises(BadRequestError, match="mood"):
        read_conversation(given, PLAIN)


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ([USER, {"role": "user", "contents": "hi"}], r"'contents'.*messages\[1\].*content\b"),
        ([{"content": "hi"}], r"messages\[0\]\['role'\]"),
        ([{"role": 3, "content": "hi"}], "int"),
        ([{"role": "user", "content": 3}], "int"),
        (["hi"], r"messages\[0\]"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"\['content'\]\[0\]"),
        ([{"role": "assistant", "tool_calls": [{"name": "f"}]}], r"\['tool_calls'\]\[0\]"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "arguments",
        ),
        ([], "list"),
        (None, "none"),
        ({"role": "user"}, "dict"),
    ],
)
def test_wrong_message_is_named(given: Any, shown: str) -> None:
    with pytest.raises(BadRequestError, match=shown) as caught:
        read_conversation(given, PLAIN)
    assert caught.value.param == "messages"
