"""Tool calls of DeepSeek V3.1: the head is the name."""

from __future__ import annotations

import re

from tokenspeed_core.api import ParserContext
from tokenspeed_parsers.sections import SectionCalls, SectionFormat

TOKENS = SectionFormat(
    section="<｜tool▁calls▁begin｜>",
    section_end="<｜tool▁calls▁end｜>",
    call="<｜tool▁call▁begin｜>",
    call_end="<｜tool▁call▁end｜>",
    separator="<｜tool▁sep｜>",
)
MARKERS = TOKENS.markers()
NAME = re.compile(r"\s*(\S{1,256})\s*")


class DeepseekV31Calls(SectionCalls):
    """Parses one reply."""

    def __init__(self, context: ParserContext) -> None:
        super().__init__(TOKENS, MARKERS, context)

    def _read_head(self, head: str) -> tuple[str, str] | None:
        match = NAME.fullmatch(head)
        return (match[1], "") if match else None
