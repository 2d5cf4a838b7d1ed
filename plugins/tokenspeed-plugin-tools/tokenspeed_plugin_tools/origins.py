"""What is told of an entry beside its metadata: who published it, how it was installed, and whether it lasts."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from tokenspeed_core.commands import DEPRECATED, OURS, Entry, contract

# By exact name: strangers publish under the prefix too. Those of `OURS` stay without plugins, these do not.
PUBLISHED = OURS | {
    "tokenspeed-kernels-blackwell",
    "tokenspeed-kernels-deepgemm",
    "tokenspeed-kernels-flashinfer",
    "tokenspeed-kernels-hopper",
    "tokenspeed-models-mistral",
}


def publisher(distribution: str) -> str:
    """Return "ours" or "third party" for a distribution's normalised name."""
    return "ours" if distribution in PUBLISHED else "third party"


def where_from(entry: Entry) -> str:
    """Return the ORIGIN of a table: who published it, and how it came here unless from an index."""
    who = publisher(entry.distribution)
    return who if entry.origin == "installed" else f"{who}, {entry.origin}"


def notice(entry: Entry) -> str:
    """Return which contract an entry follows that this core will not take for long, "" for none."""
    old = contract(entry.kind, entry.api)
    return f"{old} {DEPRECATED[old]}" if old in DEPRECATED else ""


def record_of(entry: Entry) -> dict[str, Any]:
    """Return an entry for JSON."""
    return {
        **asdict(entry),
        "publisher": publisher(entry.distribution),
        "deprecated": notice(entry),
        "is_editable": entry.origin.startswith("editable "),
    }
