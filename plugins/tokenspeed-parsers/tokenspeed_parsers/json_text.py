"""Incremental reading of JSON text, and its writing."""

from __future__ import annotations

import json
import re
from typing import Any

_IN_STRING = re.compile(r'["\\]')
_BRACKET_OR_QUOTE = re.compile(r'["{}\[\]]')
_NOT_FINITE = re.compile("NaN|Infinity")
_SCALAR = re.compile(r"[^\s,}\]]*")


class JsonScanner:
    """Finds the end of one JSON value. Checks brackets and strings only."""

    def __init__(self) -> None:
        self.is_done = False
        self.in_string = False
        self._depth = 0
        self._is_escaped = False
        self._is_scalar = False

    def feed(self, text: str, at: int = 0) -> int:
        """Scan a piece from position `at`; return the position after the part that belongs to the value."""
        while at < len(text) and not self.is_done:
            if self._is_escaped:
                self._is_escaped = False
                at += 1
            elif self.in_string:
                at = self._scan_string(text, at)
            elif self._depth:
                at = self._scan_brackets(text, at)
            elif self._is_scalar:
                match = _SCALAR.match(text, at)
                at = match.end() if match else at
                self.is_done = at < len(text)
            else:
                self.in_string = text[at] == '"'
                self._depth = int(text[at] in "{[")
                self._is_scalar = not self.in_string and not self._depth
                at += not self._is_scalar
        return at

    def _scan_string(self, text: str, at: int) -> int:
        hit = _IN_STRING.search(text, at)
        if hit is None:
            return len(text)
        self._is_escaped = hit[0] == "\\"
        self.in_string = self._is_escaped
        self.is_done = not self.in_string and not self._depth
        return hit.end()

    def _scan_brackets(self, text: str, at: int) -> int:
        hit = _BRACKET_OR_QUOTE.search(text, at)
        if hit is None:
            return len(text)
        if hit[0] == '"':
            self.in_string = True
        else:
            self._depth += 1 if hit[0] in "{[" else -1
            self.is_done = not self._depth
        return hit.end()


def read_json(text: str, *, strict: bool = False) -> Any:
    """Return the value of a JSON text, or None. `strict` refuses control characters in strings."""
    try:
        return json.loads(text, strict=strict)
    except (ValueError, RecursionError):
        return None


def normalized(text: str, value: Any) -> str | None:
    """Return JSON text with this value: the text itself if it is valid, else None if there is none."""
    if read_json(text, strict=True) is not None and _is_finite(text):
        return text.strip()
    return write_json(value)


def _is_finite(text: str) -> bool:
    """Return whether a JSON text is free of NaN and Infinity, which Python accepts."""
    return not _NOT_FINITE.search(text) or write_json(read_json(text)) is not None


def write_json(value: Any) -> str | None:
    """Return a value as JSON text that can be encoded as UTF-8, or None if JSON has no such value."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        return text if is_encodable(text) else json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return None


def is_encodable(text: str) -> bool:
    """Return whether a text has no lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
