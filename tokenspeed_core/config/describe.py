"""Formats the bounds and values of settings for help and messages."""

from __future__ import annotations

from typing import Any, get_args

from annotated_types import Ge, Gt, Le, Lt

from tokenspeed_core.config.settings import Settings


def bounds(kind: type[Settings], name: str) -> str:
    """Return the values of a setting, such as `1..65536 sequences`, `fcfs|priority` or `TEXT`."""
    metadata = kind.metadata(name)
    if kind.choices(name) or metadata["takes"]:
        return "|".join(kind.choices(name)) or str(metadata["takes"])
    field = kind.model_fields[name]
    types: tuple[Any, ...] = (field.annotation, *get_args(field.annotation))
    unit = metadata["unit"]
    if int in types or float in types:
        return _range(field.metadata) + (f" {unit}" if unit else "")
    return "TEXT"


def _range(rules: list[Any]) -> str:
    low = next(
        (
            f"above {r.gt}" if isinstance(r, Gt) else str(r.ge)
            for r in rules
            if isinstance(r, Gt | Ge)
        ),
        "",
    )
    high = next(
        (str(r.lt if isinstance(r, Lt) else r.le) for r in rules if isinstance(r, Lt | Le)), ""
    )
    if low and high:
        return f"{low}..{high}" if " " not in low else f"{low}, at most {high}"
    return f"N >= {low}" if low else "N"


def as_written(value: Any) -> str:
    """Return a setting's value as a user writes it."""
    if value is None or value in ({}, ()):
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, dict):
        each = {key: as_written(part) for key, part in value.items()}
        return " ".join(text if key == "default" else f"{key}={text}" for key, text in each.items())
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
