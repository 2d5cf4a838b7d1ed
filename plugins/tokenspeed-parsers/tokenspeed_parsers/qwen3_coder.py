"""Tool calls of Qwen3-Coder and Qwen 3.5: <function=NAME> with a <parameter=NAME> for each argument.

The function is between <tool_call> and </tool_call>, which models sometimes omit.
"""

from __future__ import annotations

from functools import partial

from tokenspeed_parsers.xml_calls import XmlCalls, XmlFormat

_TAGS = XmlFormat(
    section="<tool_call>",
    section_end="</tool_call>",
    invoke="<function=",
    invoke_end="</function>",
    parameter="<parameter=",
    parameter_end="</parameter>",
    name_end=">",
    needs_section=False,
    ends_at_parameter=True,
)

calls = partial(XmlCalls, _TAGS, _TAGS.markers())
