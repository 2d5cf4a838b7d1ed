"""Plugins: discovery from entry-point metadata, and the hooks that they may implement."""

from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_core.plugins.entry import Entry, Status
from tokenspeed_core.plugins.selection import Selection

__all__ = ["Catalog", "Entry", "Selection", "Status"]
