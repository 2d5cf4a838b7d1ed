"""The modules of the core that a command plugin may import, in addition to `api`. Importing it is cheap."""

from __future__ import annotations

from tokenspeed_core.plugins import Catalog, Entry, Preflight, Selection, Status
from tokenspeed_core.plugins.kinds import Kind, kind_of
from tokenspeed_core.plugins.selection import DEFAULTS, VARIABLE, normalize

__all__ = [
    "DEFAULTS",
    "VARIABLE",
    "Catalog",
    "Entry",
    "Kind",
    "Preflight",
    "Selection",
    "Status",
    "kind_of",
    "normalize",
]
