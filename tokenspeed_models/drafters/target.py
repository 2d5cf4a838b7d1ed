"""What drafters read from a target's `config.json`. Imports no tensor library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def hidden_size(config: Mapping[str, Any]) -> int | None:
    """Return a target's hidden size, which multi-modal configurations nest."""
    for part in (config, config.get("text_config")):
        if isinstance(part, Mapping) and isinstance(part.get("hidden_size"), int):
            size: int = part["hidden_size"]
            return size
    return None
