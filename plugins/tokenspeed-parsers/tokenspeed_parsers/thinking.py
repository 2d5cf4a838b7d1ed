"""Reasoning between <think> and </think>. The line ends around a mark belong to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from tokenspeed_core.api import ParserContext, ReplyEvent
from tokenspeed_parsers.marks import settled

OPEN, CLOSE = "<think>", "</think>"


def base(context: ParserContext) -> Thinking:
    """Return the parser of replies that may think several times, wherever they like."""
    return Thinking(is_inside=_opened(context), again=True)


def qwen3(context: ParserContext) -> Thinking:
    """Return the parser of replies that think at their beginning or not at all; later marks are content."""
    return Thinking(is_inside=_opened(context))


def deepseek_r1(context: ParserContext) -> Thinking:
    """Return the parser of replies that begin inside a thought, with or without its first mark.

    A prompt that ends with a closed thought, as templates write to switch thinking off, has had it.
    """
    return Thinking(is_inside=not context.prompt_end.rstrip().endswith(CLOSE))


def _opened(context: ParserContext) -> bool:
    """Say whether the chat template has begun the thought."""
    return context.prompt_end.rstrip().endswith(OPEN)


class Thinking:
    """Follows one reply between thought and answer."""

    def __init__(self, *, is_inside: bool, again: bool = False) -> None:
        """`is_inside`: the reply begins in a thought. `again`: there may be thoughts after the first."""
        self._kind: Literal["reasoning", "content"] = "reasoning" if is_inside else "content"
        self._again = again
        self._held = ""
        self._is_lead = True  # nothing but white space has come, after which a mark may stand
        self._is_after_mark = is_inside

    def feed(self, text: str) -> Sequence[ReplyEvent]:
        """Take the next delta of the reply."""
        self._held += text
        return self._read(is_over=False)

    def finish(self) -> Sequence[ReplyEvent]:
        """Return what was held back."""
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
        """Take the mark at the beginning, if there is one. Return whether that is certain by now."""
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
