"""Tool calls between special tokens: a section of calls, each with a head and JSON arguments."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from tokenspeed_core.api import ParserContext
from tokenspeed_parsers.arguments_text import ArgumentsText
from tokenspeed_parsers.markers import Markers
from tokenspeed_parsers.section_reader import SectionReader

MAX_HEAD_CHARS = 512


@dataclass(frozen=True)
class SectionFormat:
    """The tokens of a format. `separator` is between a call's head and its arguments."""

    section: str
    section_end: str
    call: str
    call_end: str
    separator: str

    def markers(self) -> Markers:
        """Return the tokens as markers."""
        return Markers(self.section, self.section_end, self.call, self.call_end, self.separator)


class SectionCalls(SectionReader):
    """Parses one reply. Subclasses read the head."""

    def __init__(self, tokens: SectionFormat, markers: Markers, context: ParserContext) -> None:
        super().__init__(markers, tokens.call, context)
        self._tokens = tokens
        self._text = ArgumentsText(self._arguments)

    @abstractmethod
    def _read_head(self, head: str) -> tuple[str, str] | None:
        """Return the name and the id that a head contains, or None if it is invalid."""

    def _in_content(self, piece: str, is_marker: bool) -> None:
        tokens = self._tokens
        if not is_marker:
            self._write_text(piece)
        elif piece == tokens.section:
            self._begin_section(piece)
        elif piece == tokens.call:
            self._raw, self._head = [self._take_newlines() + piece], ""
            self._state = self._in_head
        elif piece == tokens.section_end and self._has_called:
            self._has_called = False
            self._end_call()
        else:
            self._write_text(piece)

    def _in_head(self, piece: str, is_marker: bool) -> None:
        if not is_marker:
            self._head += piece
            if len(self._head) > MAX_HEAD_CHARS:
                self._write_raw()
            return
        found = self._read_head(self._head) if piece == self._tokens.separator else None
        if found is None:
            self._write_raw()
            self._state(piece, True)
        else:
            self._begin_call(*found)

    def _begin_call(self, name: str, call_id: str) -> None:
        self._raw, self._head = [], ""
        self._has_called = True
        self._call(name, call_id)
        self._text = ArgumentsText(self._arguments)
        self._state = self._in_arguments

    def _in_arguments(self, piece: str, is_marker: bool) -> None:
        if not is_marker:
            self._text.feed(piece)
        elif piece != self._tokens.separator:
            self._leave_call()
            if piece != self._tokens.call_end:
                self._state(piece, True)

    def _leave_call(self, *, is_cut: bool = False) -> None:
        self._text.end(is_cut=is_cut)
        self._end_call()
        self._state = self._in_content
        self._write_text(self._text.noise)

    def _end(self) -> None:
        if self._state == self._in_arguments:
            self._leave_call(is_cut=True)
        elif self._state != self._in_content:
            self._write_raw()

    def _is_cut_marker(self, held: str) -> bool:
        return self._state == self._in_arguments or (
            self._state == self._in_content and self._has_called
        )
