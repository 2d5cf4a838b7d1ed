"""From the text of a reply to the deltas of OpenAI's chats, through the parsers of plugins."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenspeed_core.api.parsers import ReplyEvent, ReplyParser
from tokenspeed_core.commands.serving import PluginError

Delta = str | Mapping[str, Any]  # content, or other fields of a chat's message


class ParserChain:
    """Parses one choice. Each parser gets the content that the parser before it left."""

    def __init__(self, parsers: Mapping[str, ReplyParser], *, max_calls: int | None = None) -> None:
        """`parsers` maps the names for error messages to parsers, in the order in which they run."""
        self.is_full = False  # a call beyond `max_calls` began: the answer ends before it
        self._max_calls = max_calls
        self._parsers = tuple(parsers.items())
        self._num_calls = 0
        self._call_ids: set[str] = set()
        self._arguments: list[str] = []  # of the last call

    @property
    def has_called(self) -> bool:
        """Whether there are tool calls and the last is complete. A stop string may have cut it."""
        try:
            return bool(self._num_calls and isinstance(json.loads("".join(self._arguments)), dict))
        except (ValueError, RecursionError):
            return False

    def read(self, text: str, *, is_over: bool) -> Sequence[Delta]:
        """Parse the next piece of text; return the deltas that are certain by now.

        Raises PluginError that names the parser if it raises or returns anything but events.
        """
        if self.is_full:
            return []
        if not self._parsers:
            return [text] if text else []
        events: Sequence[ReplyEvent] = [ReplyEvent("content", text)] if text else []
        name = finder = ""
        try:
            for name, parser in self._parsers:
                if len(events) == 1 and events[0].kind == "content":  # the common case
                    found = list(parser.feed(events[0].text))
                else:
                    found = [each for event in events for each in _parsed(event, parser)]
                events, finder = [*found, *parser.finish()] if is_over else found, name
            return self._deltas(events)
        except BaseException as error:
            # Plugin code may raise anything. Ctrl-C does not arrive here: a handler drains.
            culprit = name if all(isinstance(each, ReplyEvent) for each in events) else finder
            raise PluginError(
                f"{culprit} fails on a reply: {type(error).__name__}: {error}"
            ) from error

    def _deltas(self, events: Sequence[ReplyEvent]) -> Sequence[Delta]:
        deltas: list[Delta] = []
        for event in events:
            if event.kind == "call" and self._num_calls == self._max_calls:
                self.is_full = True
                break
            deltas.append(event.text if event.kind == "content" else self._delta(event))
        return deltas

    def _delta(self, event: ReplyEvent) -> Delta:
        """Return an event that is not content as a delta of the message."""
        if event.kind == "reasoning":
            return {"reasoning_content": event.text}
        call: dict[str, Any] = {"function": {"arguments": event.text}}
        if event.kind == "call":
            self._num_calls, self._arguments = self._num_calls + 1, []
            function = {"name": event.text, "arguments": ""}
            call = {"id": self._call_id(event), "type": "function", "function": function}
        else:
            self._arguments.append(event.text)
        return {"tool_calls": [{"index": self._num_calls - 1, **call}]}

    def _call_id(self, event: ReplyEvent) -> str:
        """Return the id that the model wrote, or a new one if it wrote none or repeats one."""
        call_id = event.call_id
        if not call_id or call_id in self._call_ids:
            call_id = f"call_{uuid.uuid4().hex}"
        self._call_ids.add(call_id)
        return call_id


def _parsed(event: ReplyEvent, parser: ReplyParser) -> Sequence[ReplyEvent]:
    return parser.feed(event.text) if event.kind == "content" else (event,)


def message(deltas: Iterable[Delta]) -> dict[str, Any]:
    """Return the message that the deltas add up to."""
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
