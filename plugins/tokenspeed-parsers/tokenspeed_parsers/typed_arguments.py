"""Arguments that a format writes as named text, as JSON with the types of the tool's schema."""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Callable

from tokenspeed_parsers.json_text import normalized, read_json, write_json
from tokenspeed_parsers.schema import ToolTypes

_PYTHON_WORDS = {"True": True, "true": True, "False": False, "false": False, "None": None}


class TypedArguments:
    """Writes the arguments of one call.

    Strings are streamed. Other values are converted at their end; one that does not fit its type
    becomes a string.
    """

    def __init__(
        self,
        write: Callable[[str], None],
        tools: ToolTypes,
        tool: str,
        *,
        guesses: bool = False,
        trims_newlines: bool = False,
    ) -> None:
        """`guesses`: a value of unknown type that is JSON has the type of that JSON.

        `trims_newlines`: a newline at the start and one at the end of a value are not part of it.
        """
        self._write, self._tools, self._tool = write, tools, tool
        self._guesses, self._trims_newlines = guesses, trims_newlines
        self._has_any = False
        self._types: frozenset[str] = frozenset()
        self._is_string = False
        self._is_first = False  # no text of the value yet
        self._has_newline = False  # held back, since it may be the last
        self._parts: list[str] = []  # a value that is not streamed, or not yet

    def begin(self, name: str, *, is_string: bool | None = None) -> None:
        """Begin a value. `is_string`: whether the model marks it as a string; None if it does not say."""
        self._types = self._tools.types(self._tool, name)
        if is_string is None:
            is_string = "string" in self._types or not (self._types or self._guesses)
        self._is_string, self._is_first = is_string, True
        self._write(f"{', ' if self._has_any else '{'}{json.dumps(name, ensure_ascii=False)}: ")
        self._has_any = True
        if is_string and not self._may_be_null:
            self._write('"')

    def text(self, text: str) -> None:
        """Add text to the value."""
        if not self._trims_newlines:
            self._add(text)
            return
        if self._is_first and text:
            self._is_first = False
            text = text.removeprefix("\n")
        if self._has_newline and text:
            self._has_newline = False
            self._add("\n")
        body = text.removesuffix("\n")
        self._has_newline = self._has_newline or body != text
        self._add(body)

    def end(self) -> None:
        """End the value."""
        self._has_newline = False
        text = "".join(self._parts)
        if self._is_string and not self._may_be_null:
            self._write('"')
        elif self._is_string:
            self._write("null" if text == "null" else json.dumps(text, ensure_ascii=False))
        else:
            self._write(self._converted(text))
        self._parts = []
        self._types = frozenset()

    def cut(self) -> None:
        """Write the rest of a value that was truncated at the end of the reply."""
        text = "".join(self._parts)
        if self._is_string and self._may_be_null and text:
            self._write(json.dumps(text, ensure_ascii=False)[:-1])
        else:
            self._write(text)
        self._parts = []

    def close(self) -> None:
        """End the arguments."""
        self._write("}" if self._has_any else "{}")

    @property
    def _may_be_null(self) -> bool:
        """Whether the value is a string or null, and not yet known to be a string."""
        return self._is_string and "null" in self._types

    def _add(self, text: str) -> None:
        if not self._is_string:
            self._parts.append(text)
        elif not self._may_be_null:
            self._write(json.dumps(text, ensure_ascii=False)[1:-1])
        else:
            self._parts.append(text)
            begun = "".join(self._parts)
            if not "null".startswith(begun):
                self._types, self._parts = frozenset({"string"}), []
                self._write('"')
                self._add(begun)

    def _converted(self, text: str) -> str:
        """Return a value that is not a string as JSON, or as a string if it does not fit."""
        value = read_json(text)
        written = normalized(text, value)
        if value is None and text.strip() != "null":
            value = _python_value(text.strip())
            is_value = value is not None or text.strip() == "None"
            written = write_json(value) if is_value else None
        if written is None or not _fits(value, self._types):
            return json.dumps(text, ensure_ascii=False)
        return written


def _python_value(text: str) -> object:
    """Return the value of a Python literal, or None."""
    if text in _PYTHON_WORDS:
        return _PYTHON_WORDS[text]
    return python_literal(text) if text[:1] in ("{", "[", "(") else None


def python_literal(text: str) -> object:
    """Return the value of a Python literal; None if it has no value, or is None."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in a model's strings
            return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def _fits(value: object, types: frozenset[str]) -> bool:
    if not types:
        return True
    match value:
        case None:
            return "null" in types
        case bool():
            return "boolean" in types
        case int():
            return bool(types & {"integer", "number", "float", "int"})
        case float():
            return bool(types & {"number", "float"}) or (value.is_integer() and "integer" in types)
        case dict():
            return "object" in types
        case list() | tuple():
            return "array" in types
        case _:
            return False
