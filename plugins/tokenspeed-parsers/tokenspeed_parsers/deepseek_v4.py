"""Tool calls of DeepSeek V4 in DSML: <｜DSML｜invoke name="NAME"> elements in <｜DSML｜tool_calls>.

A parameter says itself whether its text is a string or JSON: string="true" or string="false".
"""

from __future__ import annotations

from functools import partial

from tokenspeed_parsers.xml_calls import XmlCalls, XmlFormat

_TAGS = XmlFormat(
    section="<｜DSML｜tool_calls>",
    section_end="</｜DSML｜tool_calls>",
    invoke='<｜DSML｜invoke name="',
    invoke_end="</｜DSML｜invoke>",
    parameter='<｜DSML｜parameter name="',
    parameter_end="</｜DSML｜parameter>",
    name_end='">',
    typed='" string="',
    trims_newlines=False,
)

calls = partial(XmlCalls, _TAGS, _TAGS.markers())
