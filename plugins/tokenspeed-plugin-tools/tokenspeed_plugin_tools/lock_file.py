"""The format of `plugins.lock`."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tokenspeed_core import TokenSpeedError
from tokenspeed_core.commands import normalize

HEADER = (
    "# Written by `tokenspeed plugins freeze`; checked by `tokenspeed serve --plugins-lock FILE`.\n"
)


class LockError(TokenSpeedError):
    """A lock file that cannot be read or written, or does not match the installed plugins."""


@dataclass(frozen=True, slots=True)
class Locked:
    """A locked distribution.

    `sha256` is over its files. `entry_points` are "kind name = value". `editable` is the project folder of
    an editable install, "" for any other.
    """

    version: str
    sha256: str
    entry_points: tuple[str, ...]
    editable: str = ""


def read_lock(path: str) -> dict[str, Locked]:
    """Read a lock file, by normalized distribution name. Raises LockError."""
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        if not tables:
            raise ValueError("the file is empty")
        return {normalize(name): _locked(name, table) for name, table in tables.items()}
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise LockError(
            f"plugin lock {path}: {reason}. Write one with `tokenspeed plugins freeze -o FILE`."
        ) from error


def as_toml(locked: Mapping[str, Locked]) -> str:
    """Return the text of a lock file."""
    tables = [HEADER]
    for name, each in locked.items():
        lines = [f"[{name}]", f"version = {_quoted(each.version)}"]
        lines.append(f"sha256 = {_quoted(each.sha256)}")
        if each.editable:
            lines.append(f"editable = {_quoted(each.editable)}")
        lines.append("entry_points = [")
        lines += [f"    {_quoted(point)}," for point in each.entry_points]
        lines.append("]\n")
        tables.append("\n".join(lines))
    return "\n".join(tables)


def as_json_text(locked: Mapping[str, Locked]) -> str:
    """Return a lock as JSON."""
    records = {name: dataclasses.asdict(each) for name, each in locked.items()}
    return json.dumps(records, indent=2) + "\n"


def _locked(name: str, table: object) -> Locked:
    """Return one table of a lock file. Raises ValueError."""
    if not isinstance(table, dict):
        raise ValueError(f"{name} is not a table")
    points = table.pop("entry_points", None)
    texts = [*table.values(), *(points if isinstance(points, list) else [None])]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(
            f"[{name}] must have strings as values, and a list of strings as entry_points"
        )
    try:
        return Locked(**table, entry_points=tuple(points or ()))
    except TypeError as error:
        raise ValueError(f"[{name}] has a missing or unknown key") from error


def _quoted(value: str) -> str:
    """Return a TOML string. It uses the same escapes as JSON."""
    return json.dumps(value, ensure_ascii=False)
