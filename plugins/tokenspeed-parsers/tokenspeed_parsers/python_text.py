"""Python literals as JSON, written as they come."""

from __future__ import annotations

import json
import re

from tokenspeed_parsers.json_text import read_json, write_json
from tokenspeed_parsers.typed_arguments import python_literal

_ATOM = re.compile(r"[^\s,:()\[\]{}'\"]+")
_PLAIN = re.compile(r"[^'\"\\]+")
_WORDS = {"True": "true", "False": "false", "None": "null"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0"}
_ESCAPES |= {"\\": "\\", "'": "'", '"': '"', "\n": ""}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_OPENING = {"[": "[", "(": "[", "{": "{"}
_CLOSING = {"]": "]", ")": "]", "}": "}"}


class PythonValue:
    """Converts one value. Text that is not a literal becomes a string, or stays malformed."""

    def __init__(self) -> None:
        self.is_done = False
        self._depth = 0
        self._quote = ""
        self._escape = ""  # an escape sequence that is not complete
        self._atom: list[str] = []  # a number or word that may go on
        self._has_comma = False  # written if a value follows

    @property
    def in_string(self) -> bool:
        """Whether the text so far ends within a string."""
        return bool(self._quote)

    def feed(self, text: str, at: int, out: list[str]) -> int:
        """Convert a piece from position `at`; return the position of the character that ends the value.

        A value ends before a comma or bracket that is not within its own brackets.
        """
        while at < len(text) and not self.is_done:
            if self._escape:
                at += self._read_escape(text[at], out)
            elif self._quote:
                at = self._read_string(text, at, out)
            else:
                at = self._read_outside(text, at, out)
        return at

    def cut(self, out: list[str]) -> None:
        """Write the text that was held back when the reply ends."""
        atom = "".join(self._atom)
        words = (word for word in _WORDS if atom and word.startswith(atom))
        out.append(_WORDS.get(next(words, ""), atom)[: len(atom)])

    def _read_string(self, text: str, at: int, out: list[str]) -> int:
        plain = _PLAIN.match(text, at)
        if plain:
            out.append(json.dumps(plain[0], ensure_ascii=False)[1:-1])
            return plain.end()
        char = text[at]
        if char == "\\":
            self._escape = char
        elif char == self._quote:
            self._quote = ""
            out.append('"')
        else:
            out.append(json.dumps(char)[1:-1])
        return at + 1

    def _read_escape(self, char: str, out: list[str]) -> int:
        """Add a character to the escape. Return 1 if the character is part of it, else 0."""
        kind = (self._escape + char)[1]
        digits = self._escape[2:]
        if kind not in _HEX_DIGITS:
            text = _ESCAPES.get(kind, "\\" + kind)
        elif len(self._escape) == 1 or (char in "0123456789abcdefABCDEF"):
            self._escape += char
            if len(self._escape) - 2 < _HEX_DIGITS[kind]:
                return 1
            code = int(self._escape[2:], 16)
            is_character = code < 0x110000 and not 0xD800 <= code < 0xE000
            text = chr(code) if is_character else self._escape
        else:
            text, self._escape = "\\" + kind + digits, ""
            out.append(json.dumps(text, ensure_ascii=False)[1:-1])
            return 0
        self._escape = ""
        out.append(json.dumps(text, ensure_ascii=False)[1:-1])
        return 1

    def _read_outside(self, text: str, at: int, out: list[str]) -> int:
        atom = _ATOM.match(text, at)
        if atom:
            self._atom.append(atom[0])
            return atom.end()
        self._end_atom(out)
        char = text[at]
        if char in "'\"":
            self._begin_value(out)
            self._quote = char
            out.append('"')
        elif char in _OPENING:
            self._begin_value(out)
            self._depth += 1
            out.append(_OPENING[char])
        elif not self._depth and char in ",)]}":
            self.is_done = True
            return at
        elif char in _CLOSING:
            self._has_comma = False
            self._depth -= 1
            out.append(_CLOSING[char])
        elif char == ",":
            self._has_comma = True
        elif char == ":":
            out.append(": ")
        return at + 1

    def _end_atom(self, out: list[str]) -> None:
        if not self._atom:
            return
        atom, self._atom = "".join(self._atom), []
        self._begin_value(out)
        out.append(_WORDS.get(atom) or _number(atom))

    def _begin_value(self, out: list[str]) -> None:
        if self._has_comma:
            self._has_comma = False
            out.append(", ")


def _number(atom: str) -> str:
    """Return a number as JSON, or any other text as a string."""
    value = read_json(atom)
    if not isinstance(value, int | float) or isinstance(value, bool):
        value = python_literal(atom) if atom[0] in "+-.0123456789" else None
        if not isinstance(value, int | float):
            return json.dumps(atom, ensure_ascii=False)
    return write_json(value) or json.dumps(atom)
