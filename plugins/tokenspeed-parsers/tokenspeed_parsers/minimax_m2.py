"""Tool calls of MiniMax-M2: <invoke name="NAME"> elements in <minimax:tool_call>."""

from __future__ import annotations

from functools import partial

from tokenspeed_parsers.xml_calls import XmlCalls, XmlFormat

_TAGS = XmlFormat(
    section="<minimax:tool_call>",
    section_end="</minimax:tool_call>",
    invoke='<invoke name="',
    invoke_end="</invoke>",
    parameter='<parameter name="',
    parameter_end="</parameter>",
    name_end='">',
)

calls = partial(XmlCalls, _TAGS, _TAGS.markers())
