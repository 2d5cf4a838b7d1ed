"""The contract of parsers, which find reasoning and tool calls in a model's reply.

A reply comes in deltas; a complete one is a single delta. The joined events do not depend on how the text
is cut into deltas. Text that a parser does not recognize stays content.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from tokenspeed_core.targets import load_target


@dataclass(frozen=True, slots=True)
class ReplyEvent:
    """A part of a parsed reply; `text` is never empty.

    "reasoning" precedes the answer, "content" is the answer. "call" starts a call of the tool `text` and ends
    the previous call. "arguments" is the next part of the last call's JSON arguments.
    """

    kind: Literal["content", "reasoning", "call", "arguments"]
    text: str
    call_id: str = ""  # of a "call", if the model wrote an id or its format needs a certain one


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
class ReasoningMarks:
    """The texts around a model's reasoning. A grammar applies to the text after `end`."""

    begin: str  # "": replies have no opening marker
    end: str
    is_open: bool = False  # a reply starts inside the reasoning, unless the prompt closed it


@dataclass(frozen=True, slots=True)
class CallTemplate:
    """The text that a model writes for tool calls, so that a grammar can force calls.

    The text is `begin`, one or more calls with `separator` between them, and `end`. A call is `call_begin`, the
    name, `arguments_begin`, the arguments as a JSON object, and `call_end`. The texts may contain special tokens.
    """

    call_begin: str
    arguments_begin: str
    call_end: str
    begin: str = ""
    separator: str = ""
    end: str = ""


@dataclass(frozen=True, slots=True)
class ParserExample:
    """A reply as models write it, and its expected content, reasoning and calls, for the conformance kit.

    The request offers two tools: `get_weather` with the parameters `city` (a string), `days` (an
    integer), `tags` (an array of strings) and `area` (an object), and `get_time` without parameters.
    """

    reply: str
    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, Mapping[str, Any]], ...] = ()  # the name and arguments of each call
    call_ids: tuple[str, ...] = ()  # of all calls, if the model writes them
    prompt_end: str = ""


@dataclass(frozen=True, slots=True)
class ParserSpec:
    """A parser, registered in `tokenspeed.tool_parsers` or `tokenspeed.reasoning_parsers`.

    The tool parser parses the content that the reasoning parser finds.
    """

    load: str  # "module:factory"; `factory(context: ParserContext)` returns a ReplyParser
    # Replies as models write them. Empty for a parser that finds nothing.
    examples: tuple[ParserExample, ...] = ()
    reads_special_tokens: bool = False  # its marks are special tokens, so replies keep them
    reasoning: ReasoningMarks | None = None  # of a reasoning parser, for structured output
    calls: CallTemplate | None = None  # of a tool parser; None: forced calls are a JSON list
    # How `auto` chooses this parser: by texts that all occur in the model's chat template, or else by
    # the architectures in its config.json. The parser with the most texts wins.
    template_marks: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()

    def make(self, context: ParserContext) -> ReplyParser:
        """Return a parser for one reply. Raises ImportError, AttributeError, or the factory's exception."""
        parser: ReplyParser = load_target(self.load)(context)
        return parser
