"""The catalog of installed plugins, which the kit needs for every kernel that it checks."""

from __future__ import annotations

import os
import sys
from functools import lru_cache

from tokenspeed_core.plugins.catalog import Catalog


def installed_catalog() -> Catalog:
    """Return the catalog of installed plugins.

    Reading the metadata takes 30 ms, so it is read again only if the path, a folder on it, or an
    environment variable of ours has changed.
    """
    folders = tuple((folder, _changed_at(folder)) for folder in sys.path)
    ours = tuple(pair for pair in os.environ.items() if pair[0].startswith("TOKENSPEED_"))
    return _discover(folders, ours)


@lru_cache(maxsize=1)
def _discover(
    folders: tuple[tuple[str, int], ...], variables: tuple[tuple[str, str], ...]
) -> Catalog:
    return Catalog.discover()


def _changed_at(folder: str) -> int:
    """Return when entries were last added to a folder or removed from it, in ns."""
    try:
        return os.stat(folder or ".").st_mtime_ns
    except OSError:
        return 0
