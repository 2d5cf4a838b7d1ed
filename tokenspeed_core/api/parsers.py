"""Parsers that find reasoning and tool calls in a model's reply.

A reply comes in deltas; a complete one is a single delta. The joined events do not depend on how the text
is cut into deltas. Text that a parser does not recognise stays content.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from tokenspeed_core.plugins.entry import load_target


@dataclass(frozen=True, slots=True)
class ReplyEvent:
    """A part of a parsed reply; `text` is never empty.

    "reasoning" precedes the answer, "content" is the answer. "call" starts a call of the tool `text` and ends
    the previous call. "arguments" is the next part of the last call's JSON arguments.
    """

    kind: Literal["content", "reasoning", "call", "arguments"]
    text: str


@dataclass(frozen=True, slots=True)
class ParserContext:
    """The part of a request that a parser may use.

    `tools` are the tools of the request in OpenAI's format. `prompt_end` is the text of the prompt's last 64
    tokens with special tokens, since a chat template may begin the reply.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    prompt_end: str = ""


@runtime_checkable
class ReplyParser(Protocol):
    """Parses one reply. An exception fails only its own request."""

    def feed(self, text: str) -> Sequence[ReplyEvent]:
        """Parse the next delta, never empty, and return the events that are certain."""

    def finish(self) -> Sequence[ReplyEvent]:
        """Return the events for the text held back. Called once, at the end of a possibly truncated reply."""


@dataclass(frozen=True, slots=True)
class ParserSpec:
    """A parser, registered in `tokenspeed.tool_parsers` or `tokenspeed.reasoning_parsers`.

    The tool parser parses the content that the reasoning parser finds.
    """

    load: str  # "module:factory"; `factory(context: ParserContext)` returns a ReplyParser
    # For the conformance kit, a reply as models write it: with a call of `get_weather` with
    # `{"city": "Paris"}`, or with the reasoning "It rains." and the answer "Take a coat.". Empty for a
    # parser that finds nothing.
    example: str = ""
    reads_special_tokens: bool = False  # its marks are special tokens, so replies keep them

    def make(self, context: ParserContext) -> ReplyParser:
        """Return a parser for one reply. Raises ImportError, AttributeError, or the factory's exception."""
        parser: ReplyParser = load_target(self.load)(context)
        return parser
