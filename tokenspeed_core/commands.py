"""What a command of a plugin may import of the core besides `api`; it is light, so that a command may be."""

from __future__ import annotations

from tokenspeed_core.plugins import Catalog, Entry, Selection, Status

__all__ = ["Catalog", "Entry", "Selection", "Status"]
