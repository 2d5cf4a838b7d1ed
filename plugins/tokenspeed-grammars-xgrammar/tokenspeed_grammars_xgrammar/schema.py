"""Keywords of JSON schemas that XGrammar ignores: an output need not fit them, so they are refused."""

from __future__ import annotations

from typing import Any

from tokenspeed_core.api import GrammarError

_IGNORED = frozenset(
    {
        "multipleOf",
        "uniqueItems",
        "contains",
        "minContains",
        "maxContains",
        "not",
        "if",
        "then",
        "else",
        "dependentRequired",
        "dependentSchemas",
        "dependencies",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
    }
)
_FORMATS = frozenset(
    {
        "email",
        "date",
        "time",
        "date-time",
        "duration",
        "ipv4",
        "ipv6",
        "hostname",
        "uuid",
        "uri",
        "uri-reference",
        "uri-template",
        "json-pointer",
        "relative-json-pointer",
    }
)
_TYPES = frozenset({"null", "boolean", "object", "array", "number", "string", "integer"})
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_SINGLE = ("items", "additionalProperties", "additionalItems", "propertyNames", "unevaluatedItems")


def check_schema(schema: Any) -> None:
    """Raise GrammarError that names a keyword that XGrammar ignores or cannot resolve."""
    left = [schema]
    while left:
        each = left.pop()
        if isinstance(each, bool):
            continue
        if not isinstance(each, dict):
            raise GrammarError(f"a schema is an object or a boolean, not {type(each).__name__}")
        _check_keywords(each)
        for name in _LISTS:
            left += each.get(name, [])
        for name in _MAPS:
            left += each.get(name, {}).values()
        for name in _SINGLE:
            found = each.get(name)
            left += found if isinstance(found, list) else [] if found is None else [found]


def _check_keywords(schema: dict[str, Any]) -> None:
    ignored = sorted(_IGNORED & schema.keys())
    if ignored:
        raise GrammarError(f"unsupported keyword {ignored[0]!r}")
    reference = schema.get("$ref", "#")
    if not isinstance(reference, str) or not reference.startswith("#"):
        raise GrammarError(
            f"only references inside the schema are supported: {str(reference)[:80]!r}"
        )
    types = schema.get("type", [])
    unknown = {*([types] if isinstance(types, str) else types)} - _TYPES
    if unknown:
        raise GrammarError(f"unknown type {sorted(map(str, unknown))[0]!r}")
    if "format" in schema and schema["format"] not in _FORMATS:
        raise GrammarError(f"unsupported format {str(schema['format'])[:80]!r}")
