"""One entry point of an installed distribution."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Status(StrEnum):
    """Whether an entry may be used."""

    OK = "ok"
    DISABLED = "disabled"  # excluded by the user
    INCOMPATIBLE = "incompatible"  # another contract or core version, or an unknown kind
    FAILED = "failed"  # its import or a check failed, or two distributions claim its name


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry point of a group `tokenspeed.<kind>`, read from metadata.

    `api` is the contract number, None if the entry declares none. `requires_core` is a version
    specifier, "" for any version. `reason` explains every status but ok. `origin` is "installed",
    "editable PATH", or the path or URL that pip installed from. `root` is the folder that holds the
    distribution's metadata. `traceback` is set if the import failed.
    """

    kind: str
    name: str
    value: str
    api: int | None
    distribution: str  # normalized name
    version: str
    requires_core: str
    status: Status
    reason: str
    origin: str = field(default="installed", compare=False)
    root: str = field(default="", compare=False)
    traceback: str = field(default="", compare=False)

    def __str__(self) -> str:
        """Return the entry's kind and name, and its distribution."""
        return f"{self.kind} {self.name} of {self.distribution} {self.version}"

    @property
    def scopes(self) -> tuple[str, str, str]:
        """The names that select this entry: DISTRIBUTION, DISTRIBUTION:KIND, DISTRIBUTION:KIND:NAME."""
        kind = f"{self.distribution}:{self.kind}"
        return self.distribution, kind, f"{kind}:{self.name}"


@dataclass(frozen=True, slots=True)
class Preflight:
    """The result of the check of installed plugins that runs before any is imported.

    `problems` maps entries that must not be imported to the reason. `digests` maps locked distributions
    to the SHA-256 of their files.
    """

    problems: Mapping[Entry, str]
    digests: Mapping[str, str]
