"""Tool calls as JSON between <tool_call> and </tool_call> (Hermes, Qwen 2.5 and Qwen 3).

Text between the markers that is not a call stays content, with its markers. Markers within the
strings of a call belong to the strings.
"""

from __future__ import annotations

from tokenspeed_core.api import ParserContext
from tokenspeed_parsers.json_calls import CallObject, Status
from tokenspeed_parsers.markers import Markers
from tokenspeed_parsers.reader import Reader

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_MARKERS = Markers(OPEN, CLOSE)


class TaggedCalls(Reader):
    """Parses one reply."""

    def __init__(self, context: ParserContext) -> None:
        super().__init__(_MARKERS)
        self._object = CallObject(self._call, self._arguments)
        self._lead = ""  # the opening marker, until a call is found

    def _in_content(self, piece: str, is_marker: bool) -> None:
        if is_marker and piece == OPEN:
            self._open()
        else:
            self._write_text(piece)

    def _open(self) -> None:
        self._lead = self._take_newlines() + OPEN
        self._object = CallObject(self._call, self._arguments)
        self._state = self._in_call

    def _in_call(self, piece: str, is_marker: bool) -> None:
        call = self._object
        if is_marker and not call.in_string:
            self._write_raw()
            self._state(piece, True)
            return
        size = call.feed(piece)
        if call.status is Status.FAILED:
            self._write_raw()
        elif call.status is Status.DONE:
            self._after_object()
        if size < len(piece):
            self._state(piece[size:], False)

    def _write_raw(self) -> None:
        """Leave an object that is not a call, or not complete."""
        raw = self._object.take_raw()
        if self._object.has_called:
            self._after_object()
            self._write_text(raw)
        else:
            self._state = self._in_content
            self._write_text(self._lead + raw)

    def _after_object(self) -> None:
        self._end_call()
        self._state = self._before_close

    def _before_close(self, piece: str, is_marker: bool) -> None:
        """Read the closing marker, which may be missing."""
        if is_marker and piece == CLOSE:
            self._end_call()
            self._state = self._in_content
        else:
            self._in_content(piece, is_marker)

    def _end(self) -> None:
        if self._state == self._in_call:
            self._write_raw()

    def _is_cut_marker(self, held: str) -> bool:
        is_in_frame = self._state == self._before_close or (
            self._state == self._in_call and self._object.has_called and not self._object.in_string
        )
        return is_in_frame and CLOSE.startswith(held)
