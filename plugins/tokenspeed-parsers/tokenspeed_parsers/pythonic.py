"""Tool calls as a list of Python calls: [get_weather(city='Paris'), get_time()].

Llama 3.2 and Llama 4 write this format, Llama 4 also between <|python_start|> and <|python_end|>. As
a list may occur in any reply, it has calls only if it begins with the name of an offered tool.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from tokenspeed_core.api import ParserContext
from tokenspeed_parsers.markers import Markers
from tokenspeed_parsers.python_text import PythonValue
from tokenspeed_parsers.reader import Reader
from tokenspeed_parsers.schema import ToolTypes

START, END = "<|python_start|>", "<|python_end|>"
_MARKERS = Markers(START, END)
_SPACE = re.compile(r"\s*")
_NAME = re.compile(r"[\w.\s-]*")
_KEY = re.compile(r"\s*([^\W\d]\w*)\s*")
_KEY_END = re.compile(r"[=,)]")
_SEPARATORS = re.compile(r"[\s,]*")
_MAX_CHARS = 512  # of a name with the white space around it


class PythonCalls(Reader):
    """Parses one reply. A step reads a text from a position, and returns the position it reached."""

    def __init__(self, context: ParserContext) -> None:
        super().__init__(_MARKERS)
        self._names = ToolTypes(context.tools).names
        self._step: Callable[[str, int], int] = self._find_list
        self._raw: list[str] = []  # text that is content unless a call follows
        self._head = ""  # of a name
        self._follows_start = False  # the list follows the start marker
        self._needs_end = False  # its calls were found, so the end marker belongs to them
        self._has_arguments = False
        self._key: list[str] = []
        self._value = PythonValue()
        self._noise: list[str] = []  # arguments without a name, which become content

    def _in_content(self, piece: str, is_marker: bool) -> None:
        if is_marker and not (self._step == self._in_value and self._value.in_string):
            self._read_marker(piece)
            return
        at = 0
        while at < len(piece):
            at = self._step(piece, at)

    def _read_marker(self, marker: str) -> None:
        self._leave()
        if marker == START:
            self._raw = [self._take_newlines() + marker]
            self._follows_start = True
            self._step = self._before_list
        elif self._needs_end:
            self._needs_end = False
            self._end_call()
        else:
            self._write_text(marker)

    def _find_list(self, text: str, at: int) -> int:
        end = text.find("[", at)
        self._write_text(text[at : end if end >= 0 else len(text)])
        if end < 0:
            return len(text)
        self._raw = [self._take_newlines()]
        self._follows_start = False
        self._step = self._before_list
        return end

    def _before_list(self, text: str, at: int) -> int:
        if text[at] != "[":
            return self._read_raw(_SPACE, text, at)
        self._raw.append("[")
        self._step = self._in_name
        return at + 1

    def _read_raw(self, pattern: re.Pattern[str], text: str, at: int) -> int:
        """Keep text that belongs to the frame; leave the frame at other text."""
        match = pattern.match(text, at)
        end = match.end() if match else at
        self._raw.append(text[at:end])
        if end == at:
            self._write_raw()
        return end

    def _in_name(self, text: str, at: int) -> int:
        match = _NAME.match(text, at, at + _MAX_CHARS)
        end = match.end() if match else at
        self._head += text[at:end]
        name = self._head.strip()
        if end < len(text) and text[end] == "(" and name in self._names:
            self._needs_end = self._needs_end or self._follows_start
            self._raw, self._head = [], ""
            self._call(name)
            self._has_arguments = False
            self._step = self._in_key
            return end + 1
        may_go_on = end == len(text) and len(self._head) <= _MAX_CHARS
        if not may_go_on or not any(each.startswith(name) for each in self._names):
            self._write_raw()
        return end

    def _in_key(self, text: str, at: int) -> int:
        hit = _KEY_END.search(text, at)
        end = hit.start() if hit else len(text)
        self._key.append(text[at:end])
        if hit is None:
            return end
        key, self._key = "".join(self._key), []
        match = _KEY.fullmatch(key)
        if hit[0] == "=" and match:
            written = json.dumps(match[1], ensure_ascii=False)
            self._arguments(f"{', ' if self._has_arguments else '{'}{written}: ")
            self._has_arguments = True
            self._value, self._step = PythonValue(), self._in_value
        else:
            self._noise.append(key if hit[0] != "=" else key + "=")
            if hit[0] == ")":
                self._close()
        return end + 1

    def _in_value(self, text: str, at: int) -> int:
        out: list[str] = []
        end = self._value.feed(text, at, out)
        self._arguments("".join(out))
        if not self._value.is_done:
            return end
        if text[end] == ")":
            self._close()
        else:
            if text[end] != ",":
                self._noise.append(text[end])
            self._step = self._in_key
        return end + 1

    def _close(self) -> None:
        self._arguments("}" if self._has_arguments else "{}")
        self._after_call()

    def _after_call(self) -> None:
        self._end_call()
        noise, self._noise = "".join(self._noise), []
        self._write_text(noise)
        self._step = self._between

    def _between(self, text: str, at: int) -> int:
        """Read a separator between calls, or the end of their list."""
        if text[at] == "]":
            self._raw, self._step = [], self._find_list
            return at + 1
        if text[at].isspace() or text[at] == ",":
            return self._read_raw(_SEPARATORS, text, at)
        self._step = self._in_name
        return at

    def _leave(self) -> None:
        """Leave a list that a marker or the end of the reply cuts."""
        if self._step == self._in_value:
            out: list[str] = []
            self._value.cut(out)
            self._arguments("".join(out))
            self._after_call()
        elif self._step == self._in_key:
            self._noise.append("".join(self._key))
            self._key = []
            self._after_call()
        self._write_raw()

    def _write_raw(self) -> None:
        """Write text that did not become a call as content."""
        text, self._raw, self._head = "".join(self._raw) + self._head, [], ""
        self._step = self._find_list
        self._write_text(text)

    def _end(self) -> None:
        self._leave()

    def _is_cut_marker(self, held: str) -> bool:
        return self._needs_end and self._step == self._find_list and END.startswith(held)
