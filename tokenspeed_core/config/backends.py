"""Which backends a user wants, in order of preference and narrowed where asked, and what they are told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

AUTO: tuple[str, ...] = ("auto",)


def _names(value: Any) -> Any:
    """Read "fast,triton" as two names."""
    return tuple(name.strip() for name in value.split(",")) if isinstance(value, str) else value


def _keyed(value: Any) -> Any:
    """Read what is no mapping by phase, or one without a default, as one with it."""
    return {"default": AUTO, **value} if isinstance(value, Mapping) else {"default": value}


def _pairs(value: Any) -> Any:
    """Read "a=1 b=2", as a variable has it, or ["a=1", "b=2"], of repeated flags, as a mapping."""
    if not isinstance(value, str | list | tuple):
        return value
    pairs: dict[str, str] = {}
    for word in value.split() if isinstance(value, str) else map(str, value):
        key, _, given = word.partition("=")
        if not key or not given or key in pairs:
            raise ValueError(
                f"{key} stands there twice" if key in pairs else f"{word!r} must read NAME=VALUE"
            )
        pairs[key] = given
    return pairs


Names = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1), BeforeValidator(_names)
]
BackendChoice = Annotated[dict[str, Names], BeforeValidator(_keyed)]
"""Names by phase, those under "default" for the others: from "fast,triton", a list, or such a mapping."""
NamePairs = Annotated[dict[str, Names], BeforeValidator(_pairs)]
Pairs = Annotated[dict[str, Any], BeforeValidator(_pairs)]
