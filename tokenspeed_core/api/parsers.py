"""What reads a model's reply for the client: reasoning and tool calls out of text, delta by delta as it comes.

One contract for streams and whole replies: a whole reply is one delta. However a text is cut into deltas, the events,
joined, are the same, and what a parser does not understand stays content.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from tokenspeed_core.plugins.entry import load_target


@dataclass(frozen=True, slots=True)
class ReplyEvent:
    """What a delta of a reply says; `text` is never empty.

    "reasoning" is the thought before the answer, "content" the answer. "call": a call of the tool `text` begins, and
    the one before it, if any, is over. "arguments": the next delta of the JSON object that the last call is given.
    """

    kind: Literal["content", "reasoning", "call", "arguments"]
    text: str


@dataclass(frozen=True, slots=True)
class ParserContext:
    """What a parser may know of the request.

    `tools` are those that the model was offered, each as OpenAI writes it; `prompt_end` is the text of the prompt's
    last 64 tokens, special ones included: a chat template may have begun the reply.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    prompt_end: str = ""


@runtime_checkable
class ReplyParser(Protocol):
    """Reads one reply. An exception fails its request alone."""

    def feed(self, text: str) -> Sequence[ReplyEvent]:
        """Take the next delta of the text, never empty, and return what is certain by now."""

    def finish(self) -> Sequence[ReplyEvent]:
        """Return what was held back: the reply is over, perhaps in the middle. Called once, last."""


@dataclass(frozen=True, slots=True)
class ParserSpec:
    """A parser, entered under `tokenspeed.tool_parsers` or `tokenspeed.reasoning_parsers`.

    `load` is "module:factory"; `factory(context)` returns the ReplyParser of one reply, `context` being a
    ParserContext. The content that a reasoning parser finds is what the tool parser reads. `reads_special_tokens`:
    the marks are special tokens, so replies are decoded with those. `example` is for the conformance kit, a reply as
    models write it: with the call `get_weather` of `{"city": "Paris"}`, or with the thought "It rains." and the answer
    "Take a coat."; empty for a parser that finds nothing.
    """

    load: str
    example: str = ""
    reads_special_tokens: bool = False

    def make(self, context: ParserContext) -> ReplyParser:
        """Return a parser for one reply; what its factory raises, and ImportError or AttributeError, pass."""
        parser: ReplyParser = load_target(self.load)(context)
        return parser
