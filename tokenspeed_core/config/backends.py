"""The types of settings that select backends and set their options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from tokenspeed_core.config.settings import setting

AUTO: tuple[str, ...] = ("auto",)
PHASES = ("prefill", "decode")


def _names(value: Any) -> Any:
    """Read "fast,triton" as two names."""
    return tuple(name.strip() for name in value.split(",")) if isinstance(value, str) else value


def _keyed(value: Any) -> Any:
    """Return a mapping with the key "default"."""
    return {"default": AUTO, **value} if isinstance(value, Mapping) else {"default": value}


def _pairs(value: Any) -> Any:
    """Read "a=1 b=2" (a variable) or ["a=1", "b=2"] (repeated flags) as a mapping."""
    if not isinstance(value, str | list | tuple):
        return value
    pairs: dict[str, str] = {}
    for word in value.split() if isinstance(value, str) else map(str, value):
        key, _, given = word.partition("=")
        if not key or not given or key in pairs:
            raise ValueError(
                f"{key} is given twice" if key in pairs else f"{word!r} must be NAME=VALUE"
            )
        pairs[key] = given
    return pairs


Names = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1), BeforeValidator(_names)
]
BackendChoice = Annotated[dict[str, Names], BeforeValidator(_keyed)]
"""Backend names by phase, with "default" for the others. Also reads "fast,triton" or a list."""
NamePairs = Annotated[dict[str, Names], BeforeValidator(_pairs)]
Pairs = Annotated[dict[str, Any], BeforeValidator(_pairs)]


def backends(family: str, section: str, text: str, *, narrow: tuple[str, ...] = ()) -> Any:
    """Declare a setting that chooses the backends of a family of ops."""
    return setting(
        {"default": AUTO},
        section,
        text,
        narrow=narrow,
        kind=f"kernels.{family}",
        takes="NAME[,NAME...]",
    )
