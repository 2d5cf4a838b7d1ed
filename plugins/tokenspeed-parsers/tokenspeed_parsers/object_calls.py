"""Tool calls as JSON objects without tags around them, alone or in a list."""

from __future__ import annotations

import re
from collections.abc import Callable

from tokenspeed_parsers.json_calls import CallObject, Status
from tokenspeed_parsers.markers import Markers
from tokenspeed_parsers.reader import Reader

_OPENING = re.compile(r"[\[{]")
_SPACE = re.compile(r"\s*")
_SEPARATORS = re.compile(r"[\s,;]*")


class ObjectCalls(Reader):
    """Parses one reply. A step reads a text from a position, and returns the position it reached."""

    def __init__(self, markers: Markers) -> None:
        super().__init__(markers)
        self._step: Callable[[str, int], int] = self._find_object
        self._raw: list[str] = []  # text that is content unless a call follows
        self._in_list = False
        self._object = self._new_object()

    def _new_object(self) -> CallObject:
        raise NotImplementedError

    def _in_content(self, piece: str, is_marker: bool) -> None:
        if is_marker and not (self._step == self._in_object and self._object.in_string):
            self._read_marker(piece)
            return
        at = 0
        while at < len(piece):
            at = self._step(piece, at)

    def _read_marker(self, marker: str) -> None:
        """Begin a frame in which calls may follow."""
        self._leave()
        self._raw = [self._take_newlines() + marker]
        self._in_list = False
        self._step = self._before_object

    def _find_object(self, text: str, at: int) -> int:
        opening = _OPENING.search(text, at)
        end = opening.start() if opening else len(text)
        self._write_text(text[at:end])
        if opening:
            self._raw = [self._take_newlines()]
            self._in_list = False
            self._step = self._before_object
        return end

    def _before_object(self, text: str, at: int) -> int:
        """Read a bracket and white space before an object."""
        if text[at] == "{":
            self._object = self._new_object()
            self._step = self._in_object
            return at
        if text[at] == "[" and not self._in_list:
            self._in_list = True
            self._raw.append("[")
            return at + 1
        return self._read_raw(_SPACE, text, at)

    def _in_object(self, text: str, at: int) -> int:
        end = self._object.feed(text, at)
        if self._object.status is Status.DONE:
            self._raw = []
            self._end_call()
            self._step = self._after_object
        elif self._object.status is Status.FAILED:
            self._leave()
        return end

    def _after_object(self, text: str, at: int) -> int:
        """Read a separator between calls, or the end of their list."""
        if text[at] == "]" and self._in_list:
            self._in_list, self._raw = False, []
            return at + 1
        if text[at] == "{":
            return self._before_object(text, at)
        return self._read_raw(_SEPARATORS, text, at)

    def _read_raw(self, pattern: re.Pattern[str], text: str, at: int) -> int:
        """Keep text that belongs to the frame; leave the frame at other text."""
        match = pattern.match(text, at)
        end = match.end() if match else at
        self._raw.append(text[at:end])
        if end == at:
            self._write_raw()
        return end

    def _leave(self) -> None:
        """Leave an object that is not a call, or not complete."""
        if self._step == self._in_object:
            if self._object.has_called:
                self._raw = []
                self._end_call()
            self._raw.append(self._object.take_raw())
        self._write_raw()

    def _write_raw(self) -> None:
        """Write text that did not become a call as content."""
        raw, self._raw = "".join(self._raw), []
        self._step = self._find_object
        self._write_text(raw)

    def _end(self) -> None:
        self._leave()
