"""Conformance of a reply parser, as a class to inherit. It feeds the spec's examples in many cuts.

Subclasses set `spec = MINE`, and `kind = "tool_parsers"` or `"reasoning_parsers"`.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar
from unittest import SkipTest

from tokenspeed_core.api.parsers import (
    ParserContext,
    ParserExample,
    ParserSpec,
    ReplyEvent,
    ReplyParser,
)

NUM_TEXTS = 100
NUM_CHARS = 8_000  # of a text whose time is measured
MAX_MARKER_CHARS = 64  # that a truncated reply may lose, since a marker may begin there
MAX_SLOWDOWN = 4.0  # of a character in a text ten times as long
_STRING = {"type": "string"}
_PROPERTIES = {
    "city": _STRING,
    "days": {"type": "integer"},
    "tags": {"type": "array", "items": _STRING},
    "area": {"type": "object"},
}


def _tool(name: str, properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    function = {"name": name, "description": "Get it.", "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = (_tool("get_weather", _PROPERTIES), _tool("get_time", {}))
CONTEXT = ParserContext(TOOLS, "<|user|>\nWhat is the weather in Paris?\n<|assistant|>\n")
PLAIN = (
    "Hello.",
    "x",
    "Is 2 < 3 and 5 > 4?",
    "a: {1, 2}, [b]",
    "naïve 日本語 🙂\n\ntwo lines",
    'He said "no".',
)
# Characters that no format gives a meaning. They must be in some event, wherever they are.
SYMBOLS = "§☂"

Parts = Sequence[tuple[str, str]]  # (kind, text), neighbors of a kind joined


@dataclass(frozen=True)
class Found:
    """The content, reasoning and calls that a parser found in a reply."""

    content: str
    reasoning: str
    calls: tuple[tuple[str, str], ...]  # name and arguments
    call_ids: tuple[str, ...]


class ParserConformance:
    """Checks of a parser of either kind."""

    spec: ClassVar[ParserSpec]
    kind: ClassVar[str]

    def test_each_reply_has_its_own_parser(self) -> None:
        """`load` names a factory of independent ReplyParser objects."""
        text = self.spec.examples[0].reply if self.spec.examples else "a"
        one, other = self.spec.make(CONTEXT), self.spec.make(CONTEXT)
        assert isinstance(one, ReplyParser)
        events = [*one.feed(text)]
        assert joined([*other.feed("b"), *other.finish()]) == self._read("b")
        assert joined([*events, *one.finish()]) == self._read(text)

    def test_examples_cover_the_format(self) -> None:
        """The examples contain everything that a format must express. Otherwise the other checks prove little."""
        examples = self._examples()
        calls = [call for example in examples for call in example.calls]
        if self.kind == "tool_parsers":
            needs = {
                "two calls in one reply": any(len(each.calls) > 1 for each in examples),
                "text before a call": any(each.calls and each.content for each in examples),
                "a call without arguments": any(not arguments for _, arguments in calls),
                "nested arguments": any(_is_nested(arguments) for _, arguments in calls),
                "an argument beyond ASCII": any(
                    not json.dumps(arguments, ensure_ascii=False).isascii()
                    for _, arguments in calls
                ),
            }
        else:
            needs = {
                "reasoning and an answer": any(
                    each.reasoning and each.content for each in examples
                ),
                "an answer alone": any(not each.reasoning and each.content for each in examples),
                "reasoning in two lines": any("\n" in each.reasoning for each in examples),
            }
        missing = [need for need, is_met in needs.items() if not is_met]
        assert not missing, f"no example has {', '.join(missing)}"

    def test_examples_are_parsed(self) -> None:
        """Each example is parsed to the content, reasoning and calls that it declares."""
        for example in self._examples():
            parts = found(read(self.spec, [example.reply], _context(example)))
            calls = tuple((name, _json(arguments)) for name, arguments in parts.calls)
            assert calls == example.calls, f"{parts} of {example.reply!r}"
            assert parts.content == example.content, f"{parts} of {example.reply!r}"
            assert parts.reasoning == example.reasoning, f"{parts} of {example.reply!r}"
            if example.call_ids:
                assert parts.call_ids == example.call_ids, f"{parts} of {example.reply!r}"

    def test_result_does_not_depend_on_cuts(self) -> None:
        """The examples and texts made from them: whole, by character, in two parts, and at random."""
        for context, text, deltas in self._texts(everywhere=True):
            whole = self._read(text, context=context)
            assert self._read(*deltas, context=context) == whole, f"{deltas} differ from one delta"

    def test_events_are_ordered_and_not_empty(self) -> None:
        """Arguments follow a call. Only tool parsers emit calls, only reasoning parsers emit reasoning."""
        is_tool = self.kind == "tool_parsers"
        known = {"content", "call", "arguments"} if is_tool else {"content", "reasoning"}
        for context, text, deltas in self._texts():
            before = ""
            for event in read(self.spec, deltas, context):
                what = f"{event} in {text!r}"
                assert event.kind in known and event.text, what
                assert event.kind != "arguments" or before in ("call", "arguments"), what
                assert event.kind == "call" or not event.call_id, what
                before = event.kind

    def test_no_text_is_lost(self) -> None:
        """Text without calls and reasoning passes through, and symbols are in some event."""
        for text in PLAIN:
            assert "".join(said for _, said in self._read(text)) == text
        for context, text, deltas in self._texts():
            events = list(read(self.spec, deltas, context))
            parts = found(events)
            if self.kind == "tool_parsers" and not parts.calls:
                assert parts.content == text
            assert is_within(parts.content, text), (
                f"{parts.content!r} is not a subsequence of {text!r}"
            )
            said = "".join(event.text for event in events)
            for symbol in SYMBOLS:
                num = said.count(symbol) + said.count(json.dumps(symbol)[1:-1])
                assert num >= text.count(symbol), f"{symbol} of {text!r} is not in {parts}"

    def test_truncated_reply_loses_nothing(self) -> None:
        """A truncated reply loses at most markers; its last call has the arguments so far."""
        for example in self._examples():
            text, context = example.reply, _context(example)
            whole = found(read(self.spec, [text], context))
            num_marks = len(text) - len(whole.content) - len(whole.reasoning)
            for end in range(len(text)):
                parts = found(read(self.spec, [text[:end]], context))
                what = f"{parts} of {text[:end]!r}"
                for (name, arguments), full in zip(parts.calls, whole.calls, strict=False):
                    assert name == full[0] and full[1].startswith(arguments), what
                assert len(parts.calls) <= len(whole.calls), what
                if self.kind == "tool_parsers" and not parts.calls:
                    assert parts.content == text[:end], what
                if self.kind != "tool_parsers":
                    num_lost = end - len(parts.content) - len(parts.reasoning)
                    assert num_lost <= num_marks + MAX_MARKER_CHARS, what

    def test_time_is_linear(self) -> None:
        """A character costs as much in a long reply as in a short one, whatever it repeats."""
        replies = [example.reply for example in self.spec.examples[:1]]
        starts = ("", *(reply[: len(reply) // 2] for reply in replies))
        texts = [(start, unit) for start in starts for unit in ("\n", " ", "a", *replies)]
        texts += [("", unit) for unit in '<[{"']
        for start, unit in texts:
            slowdowns = (self._slowdown(start, unit) for _ in range(3))
            is_linear = any(slowdown <= MAX_SLOWDOWN for slowdown in slowdowns)
            assert is_linear, f"quadratic in {unit!r} after {start!r}"

    def _slowdown(self, start: str, unit: str) -> float:
        """Return how much slower a character of a long text is read than that of a short one."""
        seconds = []
        for num_chars in (NUM_CHARS // 10, NUM_CHARS):
            parser = self.spec.make(CONTEXT)
            parser.feed(start or "a")
            text = unit * (num_chars // len(unit))
            begun = time.process_time()
            for character in text:
                parser.feed(character)
            parser.finish()
            seconds.append((time.process_time() - begun) / len(text))
        return seconds[1] / max(seconds[0], 1e-9)

    def _examples(self) -> Sequence[ParserExample]:
        if not self.spec.examples:
            raise SkipTest("the parser has no examples, because it finds nothing")
        return self.spec.examples

    def _texts(self, *, everywhere: bool = False) -> Iterator[tuple[ParserContext, str, list[str]]]:
        """Yield (context, text, its deltas); `everywhere`: the examples, cut at every place, too."""
        examples = self.spec.examples or (ParserExample(""),)
        for example in examples:
            context, text = _context(example), example.reply
            for at in range(1, len(text) if everywhere else 0):
                yield context, text, [text[:at], text[at:]]
            for varied, deltas in variations(text, NUM_TEXTS // len(examples)):
                yield context, varied, deltas

    def _read(self, *deltas: str, context: ParserContext = CONTEXT) -> Parts:
        return joined(read(self.spec, deltas, context))


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
    kinds: list[str] = []
    texts: list[list[str]] = []
    for event in events:
        if kinds and kinds[-1] == event.kind != "call":
            texts[-1].append(event.text)
        else:
            kinds.append(event.kind)
            texts.append([event.text])
    return [(kind, "".join(parts)) for kind, parts in zip(kinds, texts, strict=True)]


def found(events: Sequence[ReplyEvent] | Iterator[ReplyEvent]) -> Found:
    """Return the parts that events form together."""
    events = list(events)
    said = {"content": "", "reasoning": ""}
    calls: list[tuple[str, str]] = []
    for kind, text in joined(events):
        if kind == "call":
            calls.append((text, ""))
        elif kind == "arguments":
            calls[-1] = (calls[-1][0], calls[-1][1] + text)
        else:
            said[kind] += text
    call_ids = tuple(event.call_id for event in events if event.kind == "call")
    return Found(said["content"], said["reasoning"], tuple(calls), call_ids)


def variations(example: str, num: int) -> Iterator[tuple[str, list[str]]]:
    """Yield (text, its deltas): random cuts of variations of an example."""
    chance = random.Random(7)
    words = [
        *re.findall(r"<[^<>\s]+>?|\w+|\W", example),
        "and ",
        "<",
        "</",
        "{",
        "}",
        '"',
        "\\",
        "\n",
        "🙂",
        *SYMBOLS,
    ]
    for number in range(num):
        text = "".join(chance.choices(words, k=chance.randint(1, 30)))
        if number % 3 == 0:  # a valid reply, followed by text that does not belong there
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


def _context(example: ParserExample) -> ParserContext:
    return ParserContext(TOOLS, example.prompt_end or CONTEXT.prompt_end)


def _is_nested(arguments: Any) -> bool:
    return any(isinstance(value, dict | list) for value in arguments.values())


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise AssertionError(f"arguments are not JSON: {text!r}") from error
