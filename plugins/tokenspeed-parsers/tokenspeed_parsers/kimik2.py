"""Tool calls of Kimi K2: the head is the call's id, functions.NAME:NUMBER."""

from __future__ import annotations

import re

from tokenspeed_core.api import ParserContext
from tokenspeed_parsers.sections import SectionCalls, SectionFormat

_TOKENS = SectionFormat(
    section="<|tool_calls_section_begin|>",
    section_end="<|tool_calls_section_end|>",
    call="<|tool_call_begin|>",
    call_end="<|tool_call_end|>",
    separator="<|tool_call_argument_begin|>",
)
_MARKERS = _TOKENS.markers()
_ID = re.compile(r"(?:functions\.)?([^\s:]+):(\d+)")


class KimiCalls(SectionCalls):
    """Parses one reply."""

    def __init__(self, context: ParserContext) -> None:
        super().__init__(_TOKENS, _MARKERS, context)

    def _read_head(self, head: str) -> tuple[str, str] | None:
        """Read an id. Models also write only the name, or only the number if there is one tool."""
        head = head.strip()
        match = _ID.fullmatch(head)
        if match:
            return match[1], head
        name, names = head.removeprefix("functions."), self._tools.names
        if head.isdecimal() and len(names) == 1:
            return next(iter(names)), head
        return (name, "") if name in names else None
