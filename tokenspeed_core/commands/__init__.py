"""What a command of a plugin may import of the core besides `api`. This much is light, so that a command may be.

Provisional: docs/contract.json holds every signature of this package; whatever changes one raises `COMMANDS_API`.
"""

from __future__ import annotations

from tokenspeed_core.plugins import Catalog, Entry, Selection, Status
from tokenspeed_core.plugins.deprecations import DEPRECATED, contract
from tokenspeed_core.plugins.kinds import KINDS, kind_of
from tokenspeed_core.plugins.selection import DEFAULTS, VARIABLE, normalise

COMMANDS_API = 4

__all__ = [
    "COMMANDS_API",
    "DEFAULTS",
    "DEPRECATED",
    "KINDS",
    "VARIABLE",
    "Catalog",
    "Entry",
    "Selection",
    "Status",
    "contract",
    "kind_of",
    "normalise",
]
