"""Tool calls as tags: a section with invocations, an invocation with a tag for each parameter.

The formats differ in their tags only. A parameter's text is streamed if its type is a string.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tokenspeed_core.api import ParserContext
from tokenspeed_parsers.markers import Markers
from tokenspeed_parsers.section_reader import SectionReader
from tokenspeed_parsers.typed_arguments import TypedArguments

MAX_NAME_CHARS = 256
_NAME = re.compile(r'[^\s<>"{}]+')
_PARAMETER = re.compile(r"[^\n<>]+")
_IS_STRING = {"": None, "true": True, "false": False}


@dataclass(frozen=True)
class XmlFormat:
    """The tags of a format. A call begins with `invoke`, its name and `name_end`."""

    section: str
    section_end: str
    invoke: str
    invoke_end: str
    parameter: str
    parameter_end: str
    name_end: str
    typed: str = ""  # after a parameter's name, before "true" if it is a string, else "false"
    needs_section: bool = True  # whether calls occur in sections only
    ends_at_parameter: bool = False  # whether a parameter may lack its closing tag
    trims_newlines: bool = True  # whether a value is on separate lines

    def markers(self) -> Markers:
        """Return the tags as markers."""
        return Markers(
            self.section,
            self.section_end,
            self.invoke,
            self.invoke_end,
            self.parameter,
            self.parameter_end,
        )


class XmlCalls(SectionReader):
    """Parses one reply."""

    def __init__(self, tags: XmlFormat, markers: Markers, context: ParserContext) -> None:
        super().__init__(markers, tags.invoke, context)
        self._tags = tags
        self._typed = TypedArguments(self._arguments, self._tools, "")
        self._noise: list[str] = []  # text between parameters, which becomes content

    def _in_content(self, piece: str, is_marker: bool) -> None:
        tags = self._tags
        if not is_marker:
            self._write_text(piece)
        elif piece == tags.section:
            self._begin_section(piece)
        elif piece == tags.invoke and (self._in_section or not tags.needs_section):
            self._raw = [self._take_newlines() + piece]
            self._state = self._in_head
        elif piece == tags.section_end and self._has_called:
            self._in_section = self._has_called = False
            self._end_call()
        else:
            self._write_text(piece)

    def _in_head(self, piece: str, is_marker: bool) -> None:
        found = self._read_head(piece, is_marker)
        if found is None:
            return
        name, rest = found
        if len(name) > MAX_NAME_CHARS or not _NAME.fullmatch(name):
            self._write_raw()
            if is_marker:
                self._state(piece, True)
            return
        self._raw, self._head = [], ""
        self._has_called = True
        self._call(name)
        self._typed = TypedArguments(
            self._arguments, self._tools, name, trims_newlines=self._tags.trims_newlines
        )
        self._state = self._in_call
        if rest:
            self._state(rest, False)

    def _read_head(self, piece: str, is_marker: bool) -> tuple[str, str] | None:
        """Return the text before and after `name_end`; ("", "") if it cannot follow, None if it may."""
        if is_marker:
            return "", ""
        self._head += piece
        head, end, rest = self._head.partition(self._tags.name_end)
        if end:
            return head, rest
        return ("", "") if len(head) > MAX_NAME_CHARS or "\n" in head else None

    def _in_call(self, piece: str, is_marker: bool) -> None:
        """Read between the parameters."""
        tags = self._tags
        if not is_marker:
            self._noise.append(piece)
        elif piece == tags.parameter:
            self._state = self._in_parameter_name
        elif piece != tags.parameter_end:
            self._typed.close()
            self._leave_call()
            if piece != tags.invoke_end:
                self._state(piece, True)

    def _leave_call(self) -> None:
        self._end_call()
        noise, self._noise = "".join(self._noise), []
        self._write_text(noise)
        self._state = self._in_content

    def _in_parameter_name(self, piece: str, is_marker: bool) -> None:
        found = self._read_head(piece, is_marker)
        if found is None:
            return
        name, _, typed = found[0].partition(self._tags.typed or "\0")
        is_name = len(found[0]) <= MAX_NAME_CHARS and _PARAMETER.fullmatch(name)
        if is_name and typed in _IS_STRING:
            self._head = ""
            self._typed.begin(name, is_string=_IS_STRING[typed])
            self._state = self._in_value
            if found[1]:
                self._state(found[1], False)
        else:
            self._noise.append(self._tags.parameter + self._head)
            self._head, self._state = "", self._in_call
            if is_marker:
                self._state(piece, True)

    def _in_value(self, piece: str, is_marker: bool) -> None:
        tags = self._tags
        ends = is_marker and (
            piece in (tags.parameter_end, tags.invoke_end, tags.section_end)
            or (piece == tags.parameter and tags.ends_at_parameter)
        )
        if ends:
            self._typed.end()
            self._state = self._in_call
            self._state(piece, True)
        else:
            self._typed.text(piece)

    def _end(self) -> None:
        if self._state in (self._before_call, self._in_head):
            self._write_raw()
        elif self._state == self._in_value:
            self._typed.cut()
            self._leave_call()
        elif self._state in (self._in_call, self._in_parameter_name):
            self._leave_call()

    def _is_cut_marker(self, held: str) -> bool:
        return self._state in (self._in_call, self._in_value) or (
            self._has_called
            and self._state == self._in_content
            and self._tags.section_end.startswith(held)
        )
