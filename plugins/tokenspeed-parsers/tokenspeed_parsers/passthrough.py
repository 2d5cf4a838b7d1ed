"""A parser that treats the whole reply as content."""

from __future__ import annotations

from collections.abc import Sequence

from tokenspeed_core.api import ParserContext, ReplyEvent


class Passthrough:
    """Finds no calls."""

    def __init__(self, context: ParserContext) -> None:
        pass

    def feed(self, text: str) -> Sequence[ReplyEvent]:
        """Return the text as content."""
        return [ReplyEvent("content", text)]

    def finish(self) -> Sequence[ReplyEvent]:
        """Return nothing."""
        return []
