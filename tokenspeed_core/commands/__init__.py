"""What a command of a plugin may import of the core besides `api`. This much is light, so that a command may be.

Provisional: a minor of tokenspeed-core may change it.
"""

from __future__ import annotations

from tokenspeed_core.plugins import Catalog, Entry, Selection, Status
from tokenspeed_core.plugins.deprecations import DEPRECATED
from tokenspeed_core.plugins.kinds import KINDS, kind_of
from tokenspeed_core.plugins.selection import OURS, VARIABLE, normalise

__all__ = ["DEPRECATED", "KINDS", "OURS", "VARIABLE", "Catalog", "Entry", "Selection", "Status", "kind_of", "normalise"]
