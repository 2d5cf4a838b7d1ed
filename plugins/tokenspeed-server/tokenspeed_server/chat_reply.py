"""A reply between text and client: what the parsers find in it, in the words of OpenAI's API."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenspeed_core.api.parsers import ReplyEvent, ReplyParser
from tokenspeed_core.commands.serving import PluginError

Delta = str | Mapping[str, Any]  # of a reply: content, or what else it adds to a chat's message


class Reader:
    """Reads one choice; each parser reads the content that the one before it found."""

    def __init__(self, parsers: Mapping[str, ReplyParser]) -> None:
        """Take the parsers, each by what it is called in errors."""
        self._parsers = tuple(parsers.items())  # which is faster to walk, for each token
        self._num_calls = 0
        self._arguments: list[str] = []  # of the last call

    @property
    def has_called(self) -> bool:
        """Whether there are calls, the last of them complete: a stop string may have cut it."""
        try:
            return bool(self._num_calls and isinstance(json.loads("".join(self._arguments)), dict))
        except (ValueError, RecursionError):
            return False

    def read(self, text: str, *, is_over: bool) -> Sequence[Delta]:
        """Take the next delta of text and return what is certain by now.

        Raises PluginError, which names the parser, for whatever one raises and for what is no event.
        """
        if not self._parsers:
            return [text] if text else []
        events: Sequence[ReplyEvent] = [ReplyEvent("content", text)] if text else []
        name = finder = ""
        try:
            for name, parser in self._parsers:
                found = [
                    each
                    for event in events
                    for each in (parser.feed(event.text) if event.kind == "content" else (event,))
                ]
                events, finder = [*found, *parser.finish()] if is_over else found, name
            return [each.text if each.kind == "content" else self._delta(each) for each in events]
        except (
            BaseException
        ) as error:  # plugin code may raise anything; Ctrl-C, which drains, does not come here
            whose = name if all(isinstance(each, ReplyEvent) for each in events) else finder
            raise PluginError(
                f"{whose} fails on a reply: {type(error).__name__}: {error}"
            ) from error

    def _delta(self, event: ReplyEvent) -> Delta:
        """Return what is no content as a delta of the message."""
        if event.kind == "reasoning":
            return {"reasoning_content": event.text}
        call: dict[str, Any] = {"function": {"arguments": event.text}}
        if event.kind == "call":
            self._num_calls, self._arguments = self._num_calls + 1, []
            function = {"name": event.text, "arguments": ""}
            call = {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}
        else:
            self._arguments.append(event.text)
        return {"tool_calls": [{"index": self._num_calls - 1, **call}]}


def message(deltas: Iterable[Delta]) -> dict[str, Any]:
    """Return the whole message that deltas make."""
    whole: dict[str, Any] = {"role": "assistant", "content": "", "refusal": None}
    for delta in deltas:
        fields: Mapping[str, Any] = {"content": delta} if isinstance(delta, str) else delta
        for name, value in fields.items():
            if name != "tool_calls":
                whole[name] = whole.get(name, "") + value
            elif "id" in (call := value[0]):
                function = {**call["function"]}
                whole.setdefault(name, []).append(
                    {"id": call["id"], "type": call["type"], "function": function}
                )
            else:
                whole[name][-1]["function"]["arguments"] += call["function"]["arguments"]
    return {**whole, "content": whole["content"] or (None if "tool_calls" in whole else "")}
