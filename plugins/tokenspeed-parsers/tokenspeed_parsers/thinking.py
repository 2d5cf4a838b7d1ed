"""Reasoning between <think> and </think>. Newlines around a marker belong to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from tokenspeed_core.api import ParserContext, ReplyEvent
from tokenspeed_parsers.marks import settled

OPEN, CLOSE = "<think>", "</think>"


def base(context: ParserContext) -> Thinking:
    """Return a parser for replies with any number of thoughts, anywhere."""
    return Thinking(is_inside=_opened(context), again=True)


def qwen3(context: ParserContext) -> Thinking:
    """Return a parser for replies with at most one thought, at the start. Later markers are
    content.
    """
    return Thinking(is_inside=_opened(context))


def deepseek_r1(context: ParserContext) -> Thinking:
    """Return a parser for replies that start inside a thought, with or without its opening marker.

    If the prompt ends with </think>, the template switched thinking off.
    """
    return Thinking(is_inside=not context.prompt_end.rstrip().endswith(CLOSE))


def _opened(context: ParserContext) -> bool:
    """Return whether the chat template ended with <think>."""
    return context.prompt_end.rstrip().endswith(OPEN)


class Thinking:
    """Parses one reply."""

    def __init__(self, *, is_inside: bool, again: bool = False) -> None:
        """Start a reply.

        `is_inside`: the reply starts inside a thought. `again`: more thoughts may follow the first.
        """
        self._kind: Literal["reasoning", "content"] = "reasoning" if is_inside else "content"
        self._again = again
        self._held = ""
        self._is_lead = True  # only white space so far
        self._is_after_mark = is_inside

    def feed(self, text: str) -> Sequence[ReplyEvent]:
        """Parse the next delta."""
        self._held += text
        return self._read(is_over=False)

    def finish(self) -> Sequence[ReplyEvent]:
        """Parse the buffered text at the end of the reply."""
        return self._read(is_over=True)

    def _read(self, *, is_over: bool) -> list[ReplyEvent]:
        found: list[ReplyEvent] = []
        if self._is_lead and not self._pass_lead(is_over):
            return found
        while self._held:
            if self._is_after_mark:
                self._held = self._held.lstrip("\n")
                self._is_after_mark = not self._held
            mark = CLOSE if self._kind == "reasoning" else OPEN if self._again else ""
            before, has_mark, after = self._held.partition(mark) if mark else (self._held, "", "")
            if has_mark:
                self._say(before.rstrip("\n"), found)
                self._kind = "content" if self._kind == "reasoning" else "reasoning"
                self._held, self._is_after_mark = after, True
                continue
            num = len(self._held) if is_over or not mark else settled(self._held, mark)
            self._say(self._held[:num], found)
            self._held = self._held[num:]
            break
        return found

    def _pass_lead(self, is_over: bool) -> bool:
        """Consume a marker at the start, if any. Return whether the start is complete."""
        text = self._held.lstrip()
        if OPEN.startswith(text) and not is_over:
            return False
        self._is_lead = False
        if text.startswith(OPEN):
            self._kind, self._held, self._is_after_mark = "reasoning", text.removeprefix(OPEN), True
        return True

    def _say(self, text: str, found: list[ReplyEvent]) -> None:
        if text:
            found.append(ReplyEvent(self._kind, text))
