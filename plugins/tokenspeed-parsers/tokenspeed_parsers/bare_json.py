"""Tool calls as bare JSON, within other text: {"name": ..., "parameters": {...}}, or a list of these.

Llama 3 writes this format, also after <|python_tag|>. As any JSON may occur in a reply, an object is
a call only if it has arguments and its name is that of an offered tool.
"""

from __future__ import annotations

from tokenspeed_core.api import ParserContext
from tokenspeed_parsers.json_calls import CallObject
from tokenspeed_parsers.markers import Markers
from tokenspeed_parsers.object_calls import ObjectCalls
from tokenspeed_parsers.schema import ToolTypes

_MARKERS = Markers("<|python_tag|>")


class BareJson(ObjectCalls):
    """Parses one reply."""

    def __init__(self, context: ParserContext) -> None:
        self._names = ToolTypes(context.tools).names
        super().__init__(_MARKERS)

    def _new_object(self) -> CallObject:
        return CallObject(
            self._call,
            self._arguments,
            accepts=self._names.__contains__,
            needs_arguments=True,
        )
