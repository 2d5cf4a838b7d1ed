"""Tool calls as JSON between <tool_call> and </tool_call> (Hermes and Qwen). Arguments are
streamed.

Newlines before a marker and after a call belong to it. Text between markers that is not a call
stays content, with its markers. Arguments that were started stay arguments, even if they turn out
malformed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from tokenspeed_core.api import ParserContext, ReplyEvent
from tokenspeed_parsers.calls import call_events, read_json
from tokenspeed_parsers.marks import settled

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_MARK = re.compile(f"{OPEN}|{CLOSE}")
_IN_STRING = re.compile(r'"|\\.|\\\Z', re.DOTALL)  # an escape may be split
# "<" cannot occur in JSON outside of strings, so it starts a marker.
_IN_OBJECT = re.compile(r'["{}<]')


class TaggedCalls:
    """Parses one reply. Each state is a method that consumes the buffer and returns whether to
    continue.
    """

    def __init__(self, context: ParserContext) -> None:
        self._held = ""
        self._before = ""  # content and marker before a possible call
        self._is_after_call = False
        self._depth = 0
        self._is_in_string = False
        self._read: Callable[[list[ReplyEvent], bool], bool] = self._read_content

    def feed(self, text: str) -> Sequence[ReplyEvent]:
        """Parse the next delta."""
        self._held += text
        return self._advance(is_over=False)

    def finish(self) -> Sequence[ReplyEvent]:
        """Parse the buffered text at the end of the reply."""
        return self._advance(is_over=True)

    def _advance(self, *, is_over: bool) -> list[ReplyEvent]:
        found: list[ReplyEvent] = []
        while self._read(found, is_over):
            pass
        return found

    def _read_content(self, found: list[ReplyEvent], is_over: bool) -> bool:
        if self._is_after_call:
            self._held = self._held.lstrip("\n")
            self._is_after_call = not self._held
        text, mark, rest = self._held.partition(OPEN)
        if not mark:
            num = len(text) if is_over else settled(text, OPEN)
            _say(text[:num], found)
            self._held = text[num:]
            return False
        content = text.rstrip("\n")
        _say(content, found)
        self._before, self._held, self._read = text[len(content) :] + OPEN, rest, self._read_head
        return True

    def _read_head(self, found: list[ReplyEvent], is_over: bool) -> bool:
        """Parse up to the arguments if the name comes first, otherwise the whole call."""
        body, mark, rest = self._held.partition(CLOSE)
        if head := _HEAD.match(body):
            found.append(ReplyEvent("call", head[1]))
            self._depth, self._is_in_string = 0, False
            self._held, self._read = self._held[head.end() :], self._read_arguments
            return True
        begins = self._held.lstrip()[:1]
        if begins in ("", "{") and not mark and not is_over:
            return False
        call = call_events(read_json(body))
        self._is_after_call, self._read = bool(call), self._read_content
        if call:
            found += call
        elif begins == "{":
            _say(self._before + body + mark, found)
        else:  # a marker in prose; a call may follow
            _say(self._before, found)
            rest = self._held
        self._held = rest
        return bool(rest)

    def _read_arguments(self, found: list[ReplyEvent], is_over: bool) -> bool:
        """Emit the text of the arguments object."""
        text, at = self._held, 0
        while hit := (_IN_STRING if self._is_in_string else _IN_OBJECT).search(text, at):
            at = hit.end()
            match hit[0]:
                case '"':
                    self._is_in_string = not self._is_in_string
                case "{":
                    self._depth += 1
                case "}":
                    self._depth -= 1
                case "\\" | "<":
                    at -= 1
                    break
            if not self._depth:
                break
        is_end = hit is not None and hit[0] != "\\"
        num = at if hit and (is_end or not is_over) else len(text)
        if num:
            found.append(ReplyEvent("arguments", text[:num]))
        self._held = text[num:]
        if is_end:
            self._read = self._read_tail
        return is_end

    def _read_tail(self, found: list[ReplyEvent], is_over: bool) -> bool:
        """Parse the text between the arguments and the next marker: the closing brace, or content."""
        mark = _MARK.search(self._held)
        if mark is None and not is_over:
            return False
        tail = self._held[: mark.start()] if mark else self._held
        rest = tail.strip().removeprefix("}").strip()
        if rest and (mark or not CLOSE.startswith(rest)):
            _say(tail, found)
        self._held = self._held[mark.end() :] if mark else ""
        self._before, self._is_after_call = OPEN, True
        self._read = self._read_head if mark and mark[0] == OPEN else self._read_content
        return bool(mark)


def _say(text: str, found: list[ReplyEvent]) -> None:
    if text:
        found.append(ReplyEvent("content", text))
