"""Tool calls of GLM 4.5 and later: <tool_call>NAME, then a key and a value for each argument.

Each key is between <arg_key> and </arg_key>, its value between <arg_value> and </arg_value>.
"""

from __future__ import annotations

import re

from tokenspeed_core.api import ParserContext
from tokenspeed_parsers.markers import Markers
from tokenspeed_parsers.reader import Reader
from tokenspeed_parsers.schema import ToolTypes
from tokenspeed_parsers.typed_arguments import TypedArguments

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"
_MARKERS = Markers(OPEN, CLOSE, KEY, KEY_END, VALUE, VALUE_END)
_NAME = re.compile(r'\s*([^\s<>"{}]{1,256})\s*')
_MAX_CHARS = 512  # of a name or a key with the white space around it


class GlmCalls(Reader):
    """Parses one reply."""

    def __init__(self, context: ParserContext) -> None:
        super().__init__(_MARKERS)
        self._tools = ToolTypes(context.tools)
        self._lead = ""  # the opening marker, until a call is found
        self._head: list[str] = []  # the name or key
        self._num_head = 0
        self._typed = TypedArguments(self._arguments, self._tools, "")
        self._noise: list[str] = []  # text where none belongs, which becomes content

    def _in_content(self, piece: str, is_marker: bool) -> None:
        if is_marker and piece == OPEN:
            self._lead = self._take_newlines() + piece
            self._begin_head()
            self._state = self._in_name
        else:
            self._write_text(piece)

    def _begin_head(self) -> None:
        self._head, self._num_head = [], 0

    def _in_name(self, piece: str, is_marker: bool) -> None:
        if not is_marker:
            self._head.append(piece)
            self._num_head += len(piece)
            if self._num_head > _MAX_CHARS or not self._may_be_name():
                self._write_raw()
            return
        match = _NAME.fullmatch("".join(self._head))
        if match is None or piece not in (KEY, CLOSE):
            self._write_raw()
            self._state(piece, True)
            return
        self._call(match[1])
        self._typed = TypedArguments(self._arguments, self._tools, match[1], guesses=True)
        self._state = self._in_call
        self._state(piece, True)

    def _may_be_name(self) -> bool:
        text = "".join(self._head)
        return text.isspace() or bool(_NAME.fullmatch(text))

    def _write_raw(self) -> None:
        """Write text that did not become a call as content."""
        self._state = self._in_content
        self._write_text(self._lead + "".join(self._head))

    def _in_call(self, piece: str, is_marker: bool) -> None:
        """Read between the arguments."""
        if not is_marker:
            self._noise.append(piece)
        elif piece == KEY:
            self._begin_head()
            self._state = self._in_key
        elif piece in (CLOSE, OPEN):
            self._typed.close()
            self._leave_call()
            if piece == OPEN:
                self._state(piece, True)

    def _in_key(self, piece: str, is_marker: bool) -> None:
        """Read a key, up to the value's marker."""
        if not is_marker:
            self._head.append(piece)
        elif piece == VALUE:
            self._typed.begin("".join(self._head).strip())
            self._state = self._in_value
        elif piece != KEY_END:
            self._noise += self._head
            self._state = self._in_call
            self._state(piece, True)

    def _in_value(self, piece: str, is_marker: bool) -> None:
        if is_marker and piece in (VALUE_END, CLOSE):
            self._typed.end()
            self._state = self._in_call
            self._state(piece, True)
        else:
            self._typed.text(piece)

    def _leave_call(self) -> None:
        self._end_call()
        noise, self._noise = "".join(self._noise), []
        self._write_text(noise)
        self._state = self._in_content

    def _end(self) -> None:
        if self._state == self._in_name:
            self._write_raw()
        elif self._state != self._in_content:
            if self._state == self._in_value:
                self._typed.cut()
            elif self._state == self._in_key:
                self._noise += self._head
            self._leave_call()

    def _is_cut_marker(self, held: str) -> bool:
        return self._state in (self._in_call, self._in_key, self._in_value)
