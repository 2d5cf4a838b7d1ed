"""Reasoning between <think> and </think>. Newlines around a marker are part of the marker.

A tool call ends a thought that has no closing marker, if the request offers tools.
"""

from __future__ import annotations

import re
from functools import partial

from tokenspeed_core.api import ParserContext
from tokenspeed_parsers.markers import Markers
from tokenspeed_parsers.reader import Reader
from tokenspeed_parsers.schema import ToolTypes

OPEN, CLOSE = "<think>", "</think>"
# The markers that begin a call, and the characters of which one must follow; "a" is a tool's name.
# A thought may mention a marker that is plain text; a special token needs nothing after it.
_CALLS = {
    "<tool_call>": "{<a",
    "<minimax:tool_call>": "<",
    "[TOOL_CALLS]": "[{a",
    "<|tool_calls_section_begin|>": "",
    "<｜tool▁calls▁begin｜>": "",
    "<｜DSML｜tool_calls>": "",
    "<|python_tag|>": "",
}
_MARKERS = Markers(OPEN, CLOSE, *_CALLS)
_NAME = re.compile(r"[\w.:-]+")
_MAX_SPACE = 64  # white space after a call's marker, in characters
_MAX_NAME = 256


def base(context: ParserContext) -> Thinking:
    """Return a parser for replies with any number of thoughts, anywhere."""
    return Thinking(context, is_inside=_opened(context), again=True)


def qwen3(context: ParserContext) -> Thinking:
    """Return a parser for replies with at most one thought, at the start."""
    return Thinking(context, is_inside=_opened(context))


def deepseek_r1(context: ParserContext) -> Thinking:
    """Return a parser for replies that start inside a thought, with or without its opening marker.

    If the prompt ends with </think>, the template switched thinking off.
    """
    return Thinking(context, is_inside=not _closed(context))


def minimax_m2(context: ParserContext) -> Thinking:
    """Return a parser as for DeepSeek R1, for a model that may write </think> twice."""
    return Thinking(context, is_inside=not _closed(context), drops_close=True)


def _opened(context: ParserContext) -> bool:
    """Return whether the chat template ended with <think>."""
    return context.prompt_end.rstrip().endswith(OPEN)


def _closed(context: ParserContext) -> bool:
    return context.prompt_end.rstrip().endswith(CLOSE)


class Thinking(Reader):
    """Parses one reply."""

    def __init__(
        self,
        context: ParserContext,
        *,
        is_inside: bool,
        again: bool = False,
        drops_close: bool = False,
    ) -> None:
        """Start a reply.

        `is_inside`: the reply starts inside a thought. `again`: more thoughts may follow the first.
        `drops_close`: a closing marker in the answer is not part of it.
        """
        super().__init__(_MARKERS)
        self._names = ToolTypes(context.tools).names
        self._again, self._drops_close = again, drops_close
        self._is_inside = is_inside
        self._lead: list[
            str
        ] = []  # white space at the start, or a call's marker and the text after it
        self._num_lead = 0
        self._state = self._in_lead

    def _in_lead(self, piece: str, is_marker: bool) -> None:
        """Read a marker at the start, and white space before it."""
        if not is_marker and piece.isspace():
            self._lead.append(piece)
            return
        lead, self._lead = "".join(self._lead), []
        if is_marker and piece == OPEN:
            self._begin("reasoning")
            return
        if self._is_inside:
            self._begin("reasoning")
        else:
            self._state = self._in_content
        self._write_text(lead)
        self._state(piece, is_marker)

    def _begin(self, kind: str) -> None:
        """Begin a thought or an answer after a marker."""
        self._take_newlines()
        self._skipped = "\n"
        self._kind = "reasoning" if kind == "reasoning" else "content"
        self._state = self._in_thought if kind == "reasoning" else self._in_content

    def _in_content(self, piece: str, is_marker: bool) -> None:
        if is_marker and piece == OPEN and self._again:
            self._begin("reasoning")
        elif not (is_marker and piece == CLOSE and self._drops_close):
            self._write_text(piece)

    def _in_thought(self, piece: str, is_marker: bool) -> None:
        if is_marker and piece == CLOSE:
            self._begin("content")
        elif is_marker and piece in _CALLS and self._names:
            self._lead, self._num_lead = [piece], 0
            self._state = partial(self._after_call_marker, _CALLS[piece])
            if not _CALLS[piece]:
                self._end_thought()
        else:
            self._write_text(piece)

    def _after_call_marker(self, following: str, piece: str, is_marker: bool) -> None:
        """Decide whether the text after a call's marker begins a call."""
        begins: bool | None = False
        if not is_marker:
            self._lead.append(piece)
            self._num_lead += len(piece)
            begins = self._begins_call(following)
        if begins:
            self._end_thought()
        elif begins is False:
            self._state = self._in_thought
            self._write_text("".join(self._lead))
            self._lead = []
        if is_marker:
            self._state(piece, True)

    def _begins_call(self, following: str) -> bool | None:
        """Return whether a call begins in the lead, or None if more text is needed."""
        text = "".join(self._lead[1:])[: _MAX_SPACE + _MAX_NAME + 1]
        word = text.lstrip()
        if len(text) - len(word) > _MAX_SPACE:
            return False
        if not word:
            return None
        if word[0] in "{[<":
            return word[0] in following
        name = _NAME.match(word)
        if name is None or "a" not in following or len(name[0]) > _MAX_NAME:
            return False
        return None if name.end() == len(word) else name[0] in self._names

    def _end_thought(self) -> None:
        """End a thought that was not closed: a call follows."""
        self._take_newlines()
        self._skipped = ""
        self._kind, self._state = "content", self._in_content
        self._drops_close = True
        self._write_text("".join(self._lead))
        self._lead = []

    def _end(self) -> None:
        if self._state == self._in_lead and self._is_inside:
            self._kind, self._skipped = "reasoning", "\n"
        self._write_text("".join(self._lead))
