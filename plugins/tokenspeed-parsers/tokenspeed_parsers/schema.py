"""The types that a tool's JSON schema allows for a parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_MAX_DEPTH = 16  # of references and combinations
_TYPES = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
    dict: "object",
    list: "array",
}


class ToolTypes:
    """The parameter types of the tools of a request."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._schemas: dict[str, Mapping[str, Any]] = {}
        for tool in tools:
            function = _mapping(tool.get("function"))
            self._schemas[str(function.get("name"))] = _mapping(function.get("parameters"))

    @property
    def names(self) -> frozenset[str]:
        """The names of the tools."""
        return frozenset(self._schemas)

    def types(self, tool: str, parameter: str) -> frozenset[str]:
        """Return the types of a parameter by their names in JSON schemas; empty if unknown."""
        root = self._schemas.get(tool, {})
        return frozenset(_types(_mapping(root.get("properties")).get(parameter), root, 0))


def _types(schema: object, root: Mapping[str, Any], depth: int) -> set[str]:
    schema = _mapping(schema)
    if depth > _MAX_DEPTH:
        return set()
    found: set[str] = set()
    named = schema.get("type")
    found.update(each for each in _list(named) if isinstance(each, str))
    if not found and "const" in schema:
        found.add(_TYPES.get(type(schema["const"]), ""))
    if not found:
        found.update(_TYPES.get(type(each), "") for each in _list(schema.get("enum")))
    if not found:
        for key in ("anyOf", "oneOf", "allOf"):
            for each in _list(schema.get(key)):
                found |= _types(each, root, depth + 1)
    if not found and isinstance(schema.get("$ref"), str):
        found = _types(_referenced(schema["$ref"], root), root, depth + 1)
    if not found and "properties" in schema:
        found = {"object"}
    return found - {""}


def _referenced(reference: str, root: Mapping[str, Any]) -> object:
    """Return the schema that a local reference such as #/$defs/Unit points to."""
    value: object = root
    for part in reference.removeprefix("#").split("/"):
        if part:
            value = _mapping(value).get(part.replace("~1", "/").replace("~0", "~"))
    return value


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: object) -> Sequence[Any]:
    """Return a value as a list, at most its first 256 elements."""
    return value[:256] if isinstance(value, list) else () if value is None else (value,)
