"""Conversations as Python programs give them, checked and converted to the form that chat templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenspeed_core.errors import BadRequestError, suggest
from tokenspeed_core.text.template import ChatTemplate

Conversation = str | Sequence[Mapping[str, Any]]
"""One message of the user as text, or messages such as `{"role": "user", "content": "Hello!"}`."""

_KEYS = frozenset(
    {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning"}
)


def read_conversation(given: Conversation, template: ChatTemplate) -> list[dict[str, Any]]:
    """Return the messages for a template: content as one text, arguments of tool calls as objects.

    Keys without a value are left out. Raises BadRequestError that names the first wrong message and key. A key
    that is not OpenAI's is allowed if the template's source names it.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, Sequence) or not given:
        raise BadRequestError(
            f"messages must be text, or a list of messages; found {_kind(given)}", "messages"
        )
    return [_message(each, f"messages[{i}]", template) for i, each in enumerate(given)]


def read_conversations(
    given: Conversation | Sequence[Conversation], template: ChatTemplate
) -> list[list[dict[str, Any]]]:
    """Return the messages of one conversation, or of each in a list. Raises BadRequestError."""
    if isinstance(given, str):
        return [read_conversation(given, template)]
    if not isinstance(given, Sequence) or not given or isinstance(given[0], Mapping):
        return [read_conversation(given, template)]  # type: ignore[arg-type]
    return [read_conversation(each, template) for each in given]  # type: ignore[arg-type]


def _message(given: Any, where: str, template: ChatTemplate) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise BadRequestError(
            f"{where} must be a dictionary with 'role' and 'content'; found {_kind(given)}",
            "messages",
        )
    for key in given:
        if key not in _KEYS and not template.mentions(str(key)) and given[key] is not None:
            hint = suggest(str(key), sorted(_KEYS))
            raise BadRequestError(f"unknown key {key!r} in {where}{hint}", "messages")
    role = given.get("role")
    if not isinstance(role, str):
        found = "it is missing" if role is None else f"found {_kind(role)}"
        raise BadRequestError(f"{where}['role'] must be text; {found}", "messages")
    calls = given.get("tool_calls")
    content = _content(given.get("content"), where)
    message = {key: value for key, value in given.items() if value is not None}
    message["content"] = "" if content is None and not calls else content
    if role == "developer" and not template.knows_developer:
        message["role"] = "system"
    if calls:
        message["tool_calls"] = [
            _call(each, f"{where}['tool_calls'][{i}]") for i, each in enumerate(calls)
        ]
    return message


def _content(given: Any, where: str) -> str | None:
    """Return the text of a content: text, a list of text parts, or nothing."""
    if given is None or isinstance(given, str):
        return given
    if not isinstance(given, Sequence):
        raise BadRequestError(
            f"{where}['content'] must be text, or a list of text parts; found {_kind(given)}",
            "messages",
        )
    texts = []
    for position, part in enumerate(given):
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str) or part.get("type", "text") != "text":
            raise BadRequestError(
                f"{where}['content'][{position}] must be {{'type': 'text', 'text': ...}}; "
                "other kinds of content are not supported",
                "messages",
            )
        texts.append(text)
    return "\n".join(texts)


def _call(given: Any, where: str) -> dict[str, Any]:
    """Return a tool call with its arguments as an object. OpenAI's clients hold them as JSON."""
    function = given.get("function") if isinstance(given, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadRequestError(f"{where} needs a 'function' with a 'name'", "messages")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise BadRequestError(
                f"{where}['function']['arguments'] is not valid JSON: {error}", "messages"
            ) from error
    if not isinstance(arguments, Mapping):
        raise BadRequestError(
            f"{where}['function']['arguments'] must be an object; found {_kind(arguments)}",
            "messages",
        )
    return {**given, "function": {**function, "arguments": dict(arguments)}}


def _kind(value: Any) -> str:
    return "none" if value is None else type(value).__name__
