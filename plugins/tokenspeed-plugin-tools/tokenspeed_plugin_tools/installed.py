"""The distributions that offer plugins, read one by one, so that one whose metadata is broken hides no other."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path
from urllib.parse import unquote, urlparse

from tokenspeed_core.commands import Entry, Status, normalise

GROUP = "tokenspeed."


@dataclass(frozen=True, slots=True)
class Finding:
    """Something wrong with a distribution. A note harms nobody, or only whoever wants what is missing."""

    distribution: str
    version: str
    what: str
    mend: str
    is_note: bool = False
    is_code_gone: bool = False


@dataclass(frozen=True, slots=True)
class Installed:
    """A distribution whose metadata was read, and the folder that holds the metadata.

    `editable` is the folder of an editable install, None for any other.
    """

    distribution: Distribution
    name: str
    version: str
    root: Path
    editable: Path | None = None


def read(found: Iterable[Distribution]) -> tuple[list[Installed], list[Finding]]:
    """Return the distributions that offer plugins, and a finding for each whose metadata cannot be read."""
    good: list[Installed] = []
    bad: list[Finding] = []
    for each in found:
        root = Path(str(each.locate_file("")))
        try:
            points = each.read_text("entry_points.txt") or ""
            if GROUP not in points:
                continue
            name, number = each.metadata["Name"], each.metadata["Version"]
            if not name or not number:
                raise ValueError(
                    "METADATA names no version" if name else "METADATA is missing or names nothing"
                )
            for line in points.splitlines():
                if line.startswith(f"[{GROUP}") and not line.rstrip().endswith("]"):
                    raise ValueError(f"entry_points.txt has a group without its end: {line}")
            for point in each.entry_points:
                if not point.pattern.match(point.value):
                    raise ValueError(
                        f"entry_points.txt has a value of another form: {point.name} = {point.value}"
                    )
            editable = editable_folder(each)
        except Exception as error:  # metadata may be anything at all
            bad.append(_unreadable(each, root, error))
        else:
            good.append(Installed(each, normalise(name), number, root, editable))
    return good, bad


def with_unreadable(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    """Return entries and one of kind "unknown" for each distribution whose metadata cannot be read, in their order."""
    lost = [
        Entry(
            "unknown",
            "?",
            "",
            None,
            normalise(each.distribution),
            each.version,
            "installed",
            "",
            Status.FAILED,
            f"{each.what}; `tokenspeed plugins doctor` has what mends it",
        )
        for each in read(distributions())[1]
    ]
    return tuple(sorted([*entries, *lost], key=lambda entry: entry.distribution))


def editable_folder(distribution: Distribution) -> Path | None:
    """Return the folder that an editable install points at. Raises ValueError for a record that is not JSON."""
    record = json.loads(distribution.read_text("direct_url.json") or "{}")
    if not record.get("dir_info", {}).get("editable"):
        return None
    return Path(unquote(urlparse(str(record["url"])).path))


def _unreadable(distribution: Distribution, root: Path, error: Exception) -> Finding:
    folder = Path(
        getattr(distribution, "_path", root)
    )  # Python has no public name for the metadata's folder
    what = f"its metadata in {folder} cannot be read: {type(error).__name__}: {error}"
    return Finding(
        folder.name.partition("-")[0],
        "",
        what,
        f"rm -r {shlex.quote(str(folder))}, then install it again",
    )
