"""Tool calls of DeepSeek V3 and R1: the head is "function".

The separator is followed by a line with the name, and a fenced block with the arguments.
"""

from __future__ import annotations

from tokenspeed_core.api import ParserContext
from tokenspeed_parsers.deepseek_v31 import MARKERS, NAME, TOKENS
from tokenspeed_parsers.sections import MAX_HEAD_CHARS, SectionCalls


class DeepseekV3Calls(SectionCalls):
    """Parses one reply."""

    def __init__(self, context: ParserContext) -> None:
        super().__init__(TOKENS, MARKERS, context)

    def _in_head(self, piece: str, is_marker: bool) -> None:
        if is_marker and piece == TOKENS.separator and self._head.strip() == "function":
            self._raw += [self._head, piece]
            self._head, self._state = "", self._in_name
        else:
            super()._in_head(piece, is_marker)

    def _read_head(self, head: str) -> tuple[str, str] | None:
        return None

    def _in_name(self, piece: str, is_marker: bool) -> None:
        name, newline, rest = ("", "", "") if is_marker else self._split_name(piece)
        match = NAME.fullmatch(name)
        if match and newline:
            self._begin_call(match[1], "")
            if rest:
                self._state(rest, False)
        elif is_marker or newline or len(self._head) > MAX_HEAD_CHARS:
            self._write_raw()
            if is_marker:
                self._state(piece, True)

    def _split_name(self, piece: str) -> tuple[str, str, str]:
        self._head += piece
        return self._head.partition("\n")
