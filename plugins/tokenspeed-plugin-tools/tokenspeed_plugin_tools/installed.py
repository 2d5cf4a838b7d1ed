"""Facts about installed distributions that the core does not read."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from difflib import get_close_matches
from importlib.machinery import PathFinder
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

from tokenspeed_core.commands import DEFAULTS, Entry, Status, normalize
from tokenspeed_plugin_tools.errors import ToolsError

GROUP = "tokenspeed."


def metadata_of(entry: Entry) -> Distribution | None:
    """Return the metadata of the copy of a distribution that an entry comes from."""
    copies = distributions(name=entry.distribution, path=[entry.root])
    return next((copy for copy in copies if copy.version == entry.version), None)


def editable_folder(entry: Entry) -> str:
    """Return the project folder of an editable install, "" for any other."""
    kind, _, folder = entry.origin.partition(" ")
    return folder if kind == "editable" else ""


def origin_column(entry: Entry) -> str:
    """Return the origin for a table, marked if the distribution is a default one."""
    return f"default, {entry.origin}" if entry.distribution in DEFAULTS else entry.origin


def source(entry: Entry) -> Path | None:
    """Return the folder or file of an entry's top-level package, without importing it; None if there is none.

    Namespace packages contain no code, so their parts are searched.
    """
    name = ""
    path: Sequence[str] | None = None
    spec = None
    for part in entry.value.partition(":")[0].split("."):
        name = f"{name}.{part}".lstrip(".")
        try:
            spec = (
                importlib.util.find_spec(name) if path is None else PathFinder.find_spec(name, path)
            )
        except (ImportError, ValueError):
            return None
        if spec is None or spec.origin is not None:
            break
        path = list(spec.submodule_search_locations or ())
    if spec is None or spec.origin is None:
        return None
    found = Path(spec.origin).resolve()
    return found if spec.submodule_search_locations is None else found.parent


def record_of(entry: Entry) -> dict[str, Any]:
    """Return an entry for JSON."""
    return {
        **asdict(entry),
        "is_default": entry.distribution in DEFAULTS,
    }


def unreadable(found: Iterable[Distribution]) -> Iterator[tuple[Path, str]]:
    """Yield (metadata folder, reason) for each distribution with metadata that cannot be read."""
    for each in found:
        # Python has no public attribute for the folder.
        folder = Path(getattr(each, "_path", "") or str(each.locate_file("")))
        try:
            if GROUP not in (each.read_text("entry_points.txt") or ""):
                continue
            if not each.metadata["Name"] or not each.metadata["Version"]:
                raise ValueError("METADATA lacks a name or a version")
            json.loads(each.read_text("direct_url.json") or "{}")
            for point in each.entry_points:
                if not point.pattern.match(point.value):
                    raise ValueError(f"invalid entry point: {point.name} = {point.value}")
        except Exception as error:  # metadata may contain anything
            yield folder, f"{type(error).__name__}: {error}"


def with_unreadable(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    """Return entries, and one of kind "unknown" for each distribution with unreadable metadata."""
    lost = [
        Entry(
            kind="unknown",
            name="?",
            value="",
            api=None,
            distribution=normalize(folder.name.partition("-")[0]),
            version="?",
            requires_core="",
            status=Status.FAILED,
            reason=f"cannot read the metadata in {folder}: {reason}",
        )
        for folder, reason in unreadable(distributions())
    ]
    return tuple(sorted([*entries, *lost], key=lambda entry: entry.distribution))


def entries_of(entries: Sequence[Entry], name: str, command: str) -> list[Entry]:
    """Return the entries of the distribution `name`, or of the distribution with an entry `name`. Raises ToolsError."""
    wanted = normalize(name)
    names = sorted({entry.distribution for entry in entries})
    if wanted not in names:
        providers = sorted({entry.distribution for entry in entries if entry.name == name})
        if len(providers) > 1:
            raise ToolsError(f"{command} {name}: choose one of {', '.join(providers)}")
        if not providers:
            near = [each for each in names if wanted and wanted in each]
            near = near or get_close_matches(wanted, names, n=1)
            hint = (
                f"did you mean {' or '.join(near)}?" if near else f"installed: {', '.join(names)}"
            )
            raise ToolsError(f"{command} {name}: no installed distribution of that name; {hint}")
        wanted = providers[0]
    return [entry for entry in entries if entry.distribution == wanted]
