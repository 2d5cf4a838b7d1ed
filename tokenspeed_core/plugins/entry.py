"""One named thing that an installed distribution provides, as its metadata tells it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """Whether an entry may be used."""

    OK = "ok"
    DISABLED = "disabled"  # the user left its distribution out
    INCOMPATIBLE = "incompatible"  # another api or core version, or a kind unknown here
    FAILED = "failed"  # its import raised, or two distributions claim its name
    UNUSED = "unused"  # nothing in this core asks for its kind
    SHADOWED = "shadowed"  # another copy of the distribution comes first on sys.path


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry point of group `tokenspeed.<kind>`. `reason` is empty where the status is ok.

    `api` is None where the entry names none; `requires_core` is a version specifier, "" for any;
    `origin` is "installed", "editable PATH", or the URL or path that pip installed from.
    """

    kind: str
    name: str
    value: str
    api: int | None
    distribution: str
    version: str
    origin: str
    requires_core: str
    status: Status
    reason: str
