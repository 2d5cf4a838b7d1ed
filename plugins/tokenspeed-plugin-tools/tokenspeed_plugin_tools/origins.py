"""What is told of an entry beside its metadata: who published it, how it was installed, and whether it lasts."""

from __future__ import annotations

import re
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, metadata
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement

from tokenspeed_core.commands import DEFAULTS, Entry, normalise

# What TokenSpeed publishes, by exact name: strangers publish under the prefix too. Only the default ones of these stay
# without plugins.
PUBLISHED = DEFAULTS | {
    "tokenspeed-kernels-blackwell",
    "tokenspeed-kernels-deepgemm",
    "tokenspeed-kernels-flashinfer",
    "tokenspeed-kernels-hopper",
    "tokenspeed-models-mistral",
}


def publisher(distribution: str) -> str:
    """Return "TokenSpeed" or "third party" for a distribution's normalised name."""
    return "TokenSpeed" if distribution in PUBLISHED else "third party"


def where_from(entry: Entry) -> str:
    """Return the ORIGIN of a table: who published it, if it is a default, and how it came here unless from an index."""
    who = publisher(entry.distribution) + " (default)" * (entry.distribution in DEFAULTS)
    return who if entry.origin == "installed" else f"{who}, {entry.origin}"


def unread_range(entry: Entry) -> str:
    """Return what of its metadata asks for a core and is no range of versions, so that any does; "" for nothing."""
    if entry.requires_core or not entry.value:  # which what cannot be read has not
        return ""
    try:
        asked = metadata(entry.distribution).get_all("Requires-Dist", [])
    except PackageNotFoundError:  # it went since it was listed
        return ""
    for line in asked:
        name = re.match(r"[\w.-]+", line)
        if name is not None and normalise(name[0]) == "tokenspeed-core":
            try:
                Requirement(line)
            except InvalidRequirement:
                return f"it requires {line!r}, which is no range: it is used with any core, and its author must mend it"
    return ""


def record_of(entry: Entry) -> dict[str, Any]:
    """Return an entry for JSON."""
    return {
        **asdict(entry),
        "publisher": publisher(entry.distribution),
        "is_default": entry.distribution in DEFAULTS,
        "unread_range": unread_range(entry),
        "is_editable": entry.origin.startswith("editable "),
    }
