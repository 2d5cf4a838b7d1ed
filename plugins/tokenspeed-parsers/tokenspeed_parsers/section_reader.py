"""The base of parsers for calls in sections: an opening marker, then calls."""

from __future__ import annotations

from abc import abstractmethod

from tokenspeed_core.api import ParserContext
from tokenspeed_parsers.markers import Markers
from tokenspeed_parsers.reader import Reader
from tokenspeed_parsers.schema import ToolTypes


class SectionReader(Reader):
    """Reads up to the head of a call. The marker `opening` begins a call."""

    def __init__(self, markers: Markers, opening: str, context: ParserContext) -> None:
        super().__init__(markers)
        self._opening = opening
        self._tools = ToolTypes(context.tools)
        self._raw: list[str] = []  # text that is content unless a call follows
        self._head = ""  # the text of a head so far
        self._in_section = False
        self._has_called = False  # in this section

    @abstractmethod
    def _in_head(self, piece: str, is_marker: bool) -> None:
        """Read the head of a call."""

    def _begin_section(self, marker: str) -> None:
        self._raw = [self._take_newlines() + marker]
        self._in_section, self._has_called = True, False
        self._state = self._before_call

    def _before_call(self, piece: str, is_marker: bool) -> None:
        """Read a section up to its first call. Anything else makes it content."""
        if not is_marker and piece.isspace():
            self._raw.append(piece)
        elif is_marker and piece == self._opening:
            self._raw.append(piece)
            self._head, self._state = "", self._in_head
        else:
            self._in_section = False
            self._write_raw()
            self._state(piece, is_marker)

    def _write_raw(self) -> None:
        """Write text that did not become a call as content."""
        text = "".join(self._raw) + self._head
        self._raw, self._head = [], ""
        self._state = self._in_content
        self._write_text(text)
