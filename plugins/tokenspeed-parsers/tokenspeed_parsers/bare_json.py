"""Calls as nothing but JSON: a reply that is one object with a name and arguments, or a list of such.

A reply that begins like one is read when it is over. It is calls where each names a tool that was offered, else it is
content.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenspeed_core.api import ParserContext, ReplyEvent
from tokenspeed_parsers.calls import call_events, read_json


class BareJson:
    """Follows one reply."""

    def __init__(self, context: ParserContext) -> None:
        self._tools = {tool["function"]["name"] for tool in context.tools}
        self._held = ""
        self._is_content = False

    def feed(self, text: str) -> Sequence[ReplyEvent]:
        """Pass text on as soon as it is clear that the reply is no JSON."""
        self._held += text
        begins = self._held.lstrip()[:1]
        self._is_content = self._is_content or begins not in ("", "{", "[")
        return self._rest() if self._is_content else []

    def finish(self) -> Sequence[ReplyEvent]:
        """Return the calls, or what was held back."""
        value = None if self._is_content else read_json(self._held)
        calls = [call_events(each) for each in (value if isinstance(value, list) else [value])]
        if calls and all(call and call[0].text in self._tools for call in calls):
            return [event for call in calls for event in call]
        return self._rest()

    def _rest(self) -> Sequence[ReplyEvent]:
        text, self._held = self._held, ""
        return [ReplyEvent("content", text)] if text else []
