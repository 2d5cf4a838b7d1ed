"""Plugins: discovery from entry-point metadata, and hooks."""

from tokenspeed_core.plugins.catalog import Catalog
from tokenspeed_core.plugins.entry import Entry, Preflight, Status
from tokenspeed_core.plugins.selection import Selection

__all__ = ["Catalog", "Entry", "Preflight", "Selection", "Status"]
