"""Reads the options of drafters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def take_integers(
    options: Mapping[str, Any], defaults: Mapping[str, int], low: int, high: int
) -> dict[str, int]:
    """Return the options with defaults for missing ones. Raises ValueError, with the name and the rule."""
    for name, value in options.items():
        if name not in defaults:
            raise ValueError(
                f"this drafter has no option {name}. Available: {', '.join(defaults)}."
            )
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(f"{name} is {value!r}, expected an integer from {low} to {high}")
    return {**defaults, **options}
