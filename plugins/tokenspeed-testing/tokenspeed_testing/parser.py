"""Conformance of a reply parser, as a class to inherit. It feeds the spec's example in every
possible cut.

Subclasses set `spec = MINE`, and `kind = "tool_parsers"` or `"reasoning_parsers"`.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from typing import ClassVar
from unittest import SkipTest

from tokenspeed_core.api.parsers import ParserContext, ParserSpec, ReplyEvent, ReplyParser

NUM_TEXTS = 300
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
CALL = ("get_weather", {"city": "Paris"})
THOUGHT, ANSWER = "It rains.", "Take a coat."
CONTEXT = ParserContext((TOOL,), "<|user|>\nWhat is the weather in Paris?\n<|assistant|>\n")
PLAIN = (
    "Hello.",
    "x",
    "Is 2 < 3 and 5 > 4?",
    "a: {1, 2}, [b]",
    "naïve 日本語 🙂\n\ntwo lines",
    'He said "no".',
)

Parts = Sequence[tuple[str, str]]  # (kind, text), neighbours of a kind joined


class ParserConformance:
    """Checks of a parser of either kind."""

    spec: ClassVar[ParserSpec]
    kind: ClassVar[str]

    def test_each_reply_has_its_own_parser(self) -> None:
        """`load` names a factory of independent ReplyParser objects."""
        one, other = self.spec.make(CONTEXT), self.spec.make(CONTEXT)
        assert isinstance(one, ReplyParser)
        events = [*one.feed(self.spec.example or "a")]
        assert joined([*other.feed("b"), *other.finish()]) == self._read("b")
        assert joined([*events, *one.finish()]) == self._read(self.spec.example or "a")

    def test_example_is_parsed(self) -> None:
        """The example contains the call of `get_weather` for Paris, or the thought and the answer."""
        if not self.spec.example:
            raise SkipTest("it has no example: it finds nothing")
        parts = self._read(self.spec.example)
        if self.kind == "tool_parsers":
            calls = [part for part in parts if part[0] != "content"]
            assert [kind for kind, _ in calls] == ["call", "arguments"], parts
            assert (calls[0][1], json.loads(calls[1][1])) == CALL, parts
        else:
            assert parts == [("reasoning", THOUGHT), ("content", ANSWER)], parts

    def test_result_does_not_depend_on_cuts(self) -> None:
        """The example and texts made from it: whole, by character, in two parts, and at random."""
        for text, deltas in cuts(self.spec.example):
            assert self._read(*deltas) == self._read(text), f"{deltas} are not read as {text!r} is"

    def test_events_are_ordered_and_not_empty(self) -> None:
        """Arguments follow a call. Only tool parsers emit calls, only reasoning parsers emit
        reasoning.
        """
        known = (
            {"content", "call", "arguments"}
            if self.kind == "tool_parsers"
            else {"content", "reasoning"}
        )
        for text, deltas in cuts(self.spec.example):
            before = ""
            for event in read(self.spec, deltas):
                assert event.kind in known and event.text, f"{event} in {text!r}"
                assert event.kind != "arguments" or before in ("call", "arguments"), (
                    f"{event} in {text!r}"
                )
                before = event.kind

    def test_other_text_is_unchanged(self) -> None:
        """Text without calls and reasoning passes through unchanged."""
        for text in PLAIN:
            assert "".join(said for _, said in self._read(text)) == text
        for text, _ in cuts(self.spec.example):
            parts = self._read(text)
            content = "".join(said for kind, said in parts if kind in ("content", "reasoning"))
            if self.kind == "tool_parsers" and all(kind == "content" for kind, _ in parts):
                assert content == text
            assert is_within(content, text), f"{content!r} is not all in {text!r}"

    def test_truncated_reply_loses_nothing(self) -> None:
        """A truncated reply loses at most a marker; a call has the arguments so far."""
        example = self.spec.example
        whole = self._read(example) if example else []
        num_marks = len(example) - sum(len(said) for _, said in whole)
        for end in range(len(example)):
            parts = self._read(example[:end])
            if any(kind == "call" for kind, _ in parts):
                (arguments,) = [said for kind, said in parts if kind == "arguments"] or [""]
                assert dict(whole)["arguments"].startswith(arguments), (
                    f"{parts} of {example[:end]!r}"
                )
            else:
                num_lost = end - sum(len(said) for _, said in parts)
                most = 0 if self.kind == "tool_parsers" else num_marks
                assert num_lost <= most, f"{parts} of {example[:end]!r}"

    def _read(self, *deltas: str) -> Parts:
        return joined(read(self.spec, deltas))


def read(
    spec: ParserSpec, deltas: Sequence[str], context: ParserContext = CONTEXT
) -> Iterator[ReplyEvent]:
    """Yield the events of a reply given in deltas."""
    parser = spec.make(context)
    for delta in deltas:
        yield from parser.feed(delta)
    yield from parser.finish()


def joined(events: Sequence[ReplyEvent] | Iterator[ReplyEvent]) -> Parts:
    """Return the content of events, independent of cuts."""
    parts: list[tuple[str, str]] = []
    for event in events:
        if parts and parts[-1][0] == event.kind != "call":
            parts[-1] = (event.kind, parts[-1][1] + event.text)
        else:
            parts.append((event.kind, event.text))
    return parts


def cuts(example: str, num: int = NUM_TEXTS) -> Iterator[tuple[str, list[str]]]:
    """Yield (text, its deltas): the example cut in two at every place, then random cuts of
    variations.
    """
    for at in range(1, len(example)):
        yield example, [example[:at], example[at:]]
    chance = random.Random(7)
    words = [
        *re.findall(r"</?\w+>|\w+|\W", example),
        "and ",
        "<",
        "</",
        "{",
        "}",
        '"',
        "\\",
        "\n",
        "🙂",
    ]
    for number in range(num):
        text = "".join(chance.choices(words, k=chance.randint(1, 30)))
        if number % 3 == 0:  # a reply as it should be, and what should not follow
            text = example + text
        elif number % 3 == 1:
            at = chance.randint(0, len(example))
            text = example[:at] + text + example[at:]
        places = (
            sorted(chance.sample(range(1, len(text)), min(len(text) - 1, chance.randint(0, 9))))
            if text
            else []
        )
        yield (
            text,
            [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True) if b > a],
        )
        yield text, list(text)


def is_within(part: str, text: str) -> bool:
    """Return whether `part` is a subsequence of `text`."""
    rest = iter(text)
    return all(character in rest for character in part)
