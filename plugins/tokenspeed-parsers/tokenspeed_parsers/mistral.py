"""Tool calls of Mistral models, after [TOOL_CALLS].

Tokenizers of version 3 write a JSON list of calls. Later ones write the name, then in some versions
[CALL_ID] and an id, then [ARGS] and the arguments; the next call has its own [TOOL_CALLS].
Mistral's templates take ids of 9 letters and digits only, so a call without an id gets such an id.
"""

from __future__ import annotations

import re
import secrets
import string

from tokenspeed_core.api import ParserContext
from tokenspeed_parsers.json_calls import CallObject
from tokenspeed_parsers.json_text import JsonScanner
from tokenspeed_parsers.markers import Markers
from tokenspeed_parsers.object_calls import ObjectCalls

OPEN, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
ID_CHARS = 9
_MARKERS = Markers(OPEN, CALL_ID, ARGUMENTS)
_SPACE = re.compile(r"\s*")
_HEAD = re.compile(r"[\w.:/\s-]*", re.ASCII)
_NAME = re.compile(r"\s*([\w.:/-]{1,256})\s*", re.ASCII)
_ID = re.compile(r"\s*([a-zA-Z0-9]{9})\s*")
_MAX_CHARS = 512  # of a name with the white space around it


class MistralCalls(ObjectCalls):
    """Parses one reply. Without [TOOL_CALLS], JSON is content."""

    def __init__(self, context: ParserContext) -> None:
        super().__init__(_MARKERS)
        self._head = ""  # the name or id that is read
        self._name = ""
        self._id = ""
        self._scanner = JsonScanner()
        self._step = self._read_content

    def _new_object(self) -> CallObject:
        return CallObject(self._call, self._arguments)

    def _call(self, name: str, call_id: str = "") -> None:
        super()._call(name, call_id if _ID.fullmatch(call_id) else _new_id())

    def _read_content(self, text: str, at: int) -> int:
        self._write_text(text[at:])
        return len(text)

    def _in_content(self, piece: str, is_marker: bool) -> None:
        in_string = self._step == self._in_arguments and self._scanner.in_string
        super()._in_content(piece, is_marker and not in_string)

    def _read_marker(self, marker: str) -> None:
        name, call_id = _NAME.fullmatch(self._head), _ID.fullmatch(self._head)
        if marker == OPEN:
            self._leave()
            self._raw = [self._take_newlines() + marker]
            self._in_list = False
            self._step = self._before_call
        elif self._step == self._in_head and name and not self._name:
            self._name = name[1]
            self._take_head(marker)
            self._step = self._in_head if marker == CALL_ID else self._before_arguments
        elif self._step == self._in_head and call_id and marker == ARGUMENTS:
            self._id = call_id[1]
            self._take_head(marker)
            self._step = self._before_arguments
        else:
            self._leave()
            self._write_text(marker)

    def _take_head(self, marker: str) -> None:
        self._raw += [self._head, marker]
        self._head = ""

    def _before_call(self, text: str, at: int) -> int:
        if text[at] in "[{":
            self._step = self._before_object
        elif text[at].isspace():
            return self._read_raw(_SPACE, text, at)
        else:
            self._head = self._name = self._id = ""
            self._step = self._in_head
        return at

    def _in_head(self, text: str, at: int) -> int:
        """Read a name, or the id after it, up to the arguments or a marker."""
        match = _HEAD.match(text, at, at + _MAX_CHARS)
        end = match.end() if match else at
        self._head += text[at:end]
        if len(self._head) <= _MAX_CHARS and end == len(text):
            return end
        pattern = _ID if self._name else _NAME
        found = pattern.fullmatch(self._head)
        if found is None or text[end : end + 1] != "{":
            self._leave()
        elif self._name:
            self._id = found[1]
            self._begin_arguments()
        else:
            self._name = found[1]
            self._begin_arguments()
        return end

    def _before_arguments(self, text: str, at: int) -> int:
        if text[at] != "{":
            return self._read_raw(_SPACE, text, at)
        self._begin_arguments()
        return at

    def _begin_arguments(self) -> None:
        self._call(self._name, self._id)
        self._raw, self._head = [], ""
        self._scanner = JsonScanner()
        self._step = self._in_arguments

    def _in_arguments(self, text: str, at: int) -> int:
        end = self._scanner.feed(text, at)
        self._arguments(text[at:end])
        if self._scanner.is_done:
            self._leave()
        return end

    def _leave(self) -> None:
        if self._step == self._in_arguments:
            self._end_call()
        super()._leave()

    def _write_raw(self) -> None:
        self._raw.append(self._head)
        self._head = ""
        super()._write_raw()
        self._step = self._read_content


def _new_id() -> str:
    letters = string.ascii_letters + string.digits
    return "".join(secrets.choice(letters) for _ in range(ID_CHARS))
