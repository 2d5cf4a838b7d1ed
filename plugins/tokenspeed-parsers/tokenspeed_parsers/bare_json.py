"""Tool calls as bare JSON: the whole reply is an object with a name and arguments, or a list of
them.

Such a reply is parsed when it is complete. It is a call if every name is an offered tool; otherwise
it is content.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenspeed_core.api import ParserContext, ReplyEvent
from tokenspeed_parsers.calls import call_events, read_json


class BareJson:
    """Parses one reply."""

    def __init__(self, context: ParserContext) -> None:
        self._tools = {tool["function"]["name"] for tool in context.tools}
        self._held = ""
        self._is_content = False

    def feed(self, text: str) -> Sequence[ReplyEvent]:
        """Return content as soon as the reply cannot be JSON."""
        self._held += text
        begins = self._held.lstrip()[:1]
        self._is_content = self._is_content or begins not in ("", "{", "[")
        return self._rest() if self._is_content else []

    def finish(self) -> Sequence[ReplyEvent]:
        """Return the calls, or the buffered text as content."""
        value = None if self._is_content else read_json(self._held)
        calls = [call_events(each) for each in (value if isinstance(value, list) else [value])]
        if calls and all(call and call[0].text in self._tools for call in calls):
            return [event for call in calls for event in call]
        return self._rest()

    def _rest(self) -> Sequence[ReplyEvent]:
        text, self._held = self._held, ""
        return [ReplyEvent("content", text)] if text else []
