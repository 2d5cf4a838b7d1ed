"""Turns errors of pydantic into messages about the rule that a value breaks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Messages for the error types of pydantic.
_RULES = {
    "must be at least {ge}": ("greater_than_equal",),
    "must be above {gt}": ("greater_than",),
    "must be at most {le}": ("less_than_equal",),
    "must not be empty": ("string_too_short", "too_short"),
    "must be a whole number": ("int_parsing", "int_type", "int_from_float"),
    "must be a number": ("float_parsing", "float_type", "finite_number"),
    "must be true or false": ("bool_parsing", "bool_type"),
    "must be a size such as 2GB, 512MiB or a number of bytes": ("byte_size", "byte_size_unit"),
    "must be a JSON object": ("dict_type", "model_type"),
    "must be a name, or names in order of preference": ("tuple_type",),
    "must be text": ("string_type",),
}


def broken_rule(error: Mapping[str, Any]) -> str:
    """Return the rule that a value breaks, such as "must be at least 1". `error` is a pydantic error."""
    kind, context = error["type"], error.get("ctx", {})
    return next(
        (rule.format(**context) for rule, kinds in _RULES.items() if kind in kinds),
        str(error["msg"]),
    )
