"""A call as a JSON object with a name and arguments."""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum, auto

from tokenspeed_parsers.json_text import JsonScanner, is_encodable, normalized, read_json

_SPACE = re.compile(r"\s*")
_ID = re.compile(r"[\w.:-]{1,64}", re.ASCII)
_ARGUMENTS = frozenset({"arguments", "parameters"})


class Status(Enum):
    """The progress of a call's object."""

    READING = auto()
    DONE = auto()
    FAILED = auto()


class CallObject:
    """Reads {"name": ..., "arguments": {...}}; "parameters" is another name for "arguments".

    Arguments are streamed if the name comes first. They may also be JSON text in a string, null, or
    missing. "id" and "type" are allowed. Any other key fails, so that no text gets lost.
    """

    def __init__(
        self,
        on_call: Callable[[str, str], None],
        on_arguments: Callable[[str], None],
        *,
        accepts: Callable[[str], bool] = bool,
        needs_arguments: bool = False,
    ) -> None:
        """`on_call` gets the name and the id; `accepts` decides whether a name is a tool's."""
        self.status = Status.READING
        self.has_called = False
        self._on_call, self._on_arguments = on_call, on_arguments
        self._accepts, self._needs_arguments = accepts, needs_arguments
        self._raw: list[str] = []  # text that was read and is in no event
        self._next = "{"  # the marks that may come next: "{", '"', '"}', ":", "value" or ",}"
        self._scanner: JsonScanner | None = None
        self._value: list[str] = []
        self._key = ""  # of the value that is read; empty while a key is read
        self._fields: dict[str, str] = {}  # the values by key, as JSON text
        self._is_streaming = False

    @property
    def in_string(self) -> bool:
        """Whether the text read so far ends within a string."""
        return self._scanner is not None and self._scanner.in_string

    def feed(self, text: str, at: int = 0) -> int:
        """Read a piece from position `at`. Return the position after the part that is in the object."""
        while at < len(text) and self.status is Status.READING:
            before = at
            at = self._read_value(text, at) if self._scanner else self._read_mark(text, at)
            if not self._is_streaming and at > before:
                self._raw.append(text[before:at])
            if self._is_streaming and self._scanner is None:
                self._is_streaming = False
        return at

    def take_raw(self) -> str:
        """Return the text that was read and is in no event."""
        raw, self._raw = "".join(self._raw), []
        return raw

    def _read_mark(self, text: str, at: int) -> int:
        """Read white space, and a brace, colon or comma; begin a key or a value."""
        space = _SPACE.match(text, at)
        if space and space.end() > at:
            return space.end()
        mark = text[at]
        if self._next == "value":
            self._begin_value(mark)
            return at
        if mark not in self._next:
            self.status = Status.FAILED
            return at
        match mark:
            case "{":
                self._next = '"}'
            case '"':
                self._key, self._scanner = "", JsonScanner()
                return at
            case ":":
                self._next = "value"
            case ",":
                self._next = '"'
            case _:
                self._finish()
                return at + (self.status is Status.DONE)
        return at + 1

    def _begin_value(self, mark: str) -> None:
        self._scanner = JsonScanner()
        if self._key == "arguments" and "name" in self._fields and mark == "{":
            self._is_streaming = True
            self._emit_call()

    def _read_value(self, text: str, at: int) -> int:
        scanner = self._scanner
        assert scanner is not None
        end = scanner.feed(text, at)
        if self._is_streaming:
            self._on_arguments(text[at:end])
        else:
            self._value.append(text[at:end])
        if scanner.is_done:
            self._scanner = None
            self._end_value()
        return end

    def _end_value(self) -> None:
        value, self._value = "".join(self._value), []
        if self._next == "value":
            self._next = ",}"
            self._fields[self._key] = value
            is_valid = self._is_streaming or self._is_valid_field(value)
        else:
            self._next = ":"
            name = read_json(value)
            self._key = "arguments" if name in _ARGUMENTS else name
            is_valid = (
                self._key in ("name", "arguments", "id", "type") and self._key not in self._fields
            )
        if not is_valid:
            self.status = Status.FAILED

    def _is_valid_field(self, text: str) -> bool:
        if self._key == "arguments":
            return True
        value = read_json(text)
        if not isinstance(value, str) or not is_encodable(value):
            return False
        if self._key == "name":
            return bool(value) and self._accepts(value)
        return bool(_ID.fullmatch(value)) if self._key == "id" else value == "function"

    def _finish(self) -> None:
        """End the object; emit the call unless its arguments were streamed."""
        arguments = None if self.has_called else self._buffered_arguments()
        if self.has_called:
            self.status = Status.DONE
        elif "name" not in self._fields or arguments is None:
            self.status = Status.FAILED
        else:
            self._emit_call()
            self._on_arguments(arguments)
            self.status = Status.DONE

    def _buffered_arguments(self) -> str | None:
        """Return the arguments as the text of an object, or None if they are something else."""
        text = self._fields.get("arguments")
        if text is None:
            return None if self._needs_arguments else "{}"
        value = read_json(text)
        if isinstance(value, str):
            text, value = value, read_json(value)
        elif value is None and text.strip() == "null":
            text, value = "{}", {}
        return normalized(text, value) if isinstance(value, dict) else None

    def _emit_call(self) -> None:
        call_id = read_json(self._fields.get("id", '""'))
        self._on_call(read_json(self._fields["name"]), call_id)
        self.has_called = True
        self._raw = []
