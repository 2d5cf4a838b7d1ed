"""Finds the installed distribution that a user names."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

from tokenspeed_core.commands import Entry, normalise
from tokenspeed_plugin_tools.errors import ToolsError


def entries_of(entries: Sequence[Entry], name: str, command: str) -> list[Entry]:
    """Return the entries of a distribution, or of the only one that provides a name. Raises ToolsError."""
    wanted = normalise(name)
    providers = {entry.distribution for entry in entries if entry.name == name}
    names = sorted({entry.distribution for entry in entries})
    if wanted not in names:
        if len(providers) > 1:
            several = ", ".join(sorted(providers))
            raise ToolsError(
                f"{command} {name}: several distributions provide it; name one: {several}"
            )
        if not providers:
            near = [each for each in names if wanted and wanted in each] or get_close_matches(
                wanted, names, n=1
            )
            meant = (
                f"did you mean {' or '.join(near)}?"
                if near
                else f"installed: {', '.join(names) or 'none'}"
            )
            raise ToolsError(
                f"{command} {name}: no installed distribution of that name provides plugins; {meant}"
            )
        (wanted,) = providers
    return [entry for entry in entries if entry.distribution == wanted]
