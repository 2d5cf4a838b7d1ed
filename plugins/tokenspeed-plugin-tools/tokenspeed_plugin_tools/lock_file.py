"""The file `plugins.lock`: what stands in it, and what is said of one that cannot be read."""

from __future__ import annotations

import dataclasses
import json
import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tokenspeed_core import TokenSpeedError
from tokenspeed_core.commands import normalise

WRITTEN = "# Written by `tokenspeed plugins freeze`"
HEADER = f"{WRITTEN}; `tokenspeed serve --plugins-lock FILE` keeps to it."


class LockError(TokenSpeedError):
    """A lock that cannot be read or written, or that what is installed does not meet."""


@dataclass(frozen=True, slots=True)
class Locked:
    """A distribution as it was frozen: `sha256` is over its files, `entry_points` are "kind name = value".

    `sha256` is "" where its code is gone, which no lock has. `editable` is the folder of an editable install, "" for
    any other.
    """

    version: str
    sha256: str
    entry_points: tuple[str, ...]
    editable: str = ""


def read_lock(path: str) -> dict[str, Locked]:
    """Read a file that `plugins freeze` wrote, by normalised name.

    Raises LockError, which says what is wrong with which distribution; it advises to write over a lock alone, and over
    no other file.
    """
    text = None
    try:
        text = Path(path).read_text(encoding="utf-8")
        return _parse(text)
    except FileNotFoundError as error:
        raise LockError(
            f"plugins lock {path}: {error.strerror}; `{freezing(path)}` writes one"
        ) from error
    except (OSError, ValueError) as error:
        what = str(error.strerror) if isinstance(error, OSError) else str(error)
        was_lock = text is not None and (text.startswith(WRITTEN) or not text)
        anew = f"restore it, or where what is installed is meant, `{freezing(path)}` writes it anew"
        mend = anew if was_lock else "name a file that `tokenspeed plugins freeze` wrote"
        raise LockError(f"plugins lock {path}: {what}; {mend}") from error


def freezing(path: str) -> str:
    """Return what writes a lock, as it is typed."""
    return f"tokenspeed plugins freeze -o {shlex.quote(path)}"


def as_toml(locked: Mapping[str, Locked]) -> str:
    """Return the text of a lock file, the distributions in the mapping's order."""
    tables = [HEADER + "\n"]
    for name, each in locked.items():
        lines = [
            f"[{name}]",
            f"version = {_quoted(each.version)}",
            f"sha256 = {_quoted(each.sha256)}",
        ]
        lines += [f"editable = {_quoted(each.editable)}"] if each.editable else []
        points = "".join(f"    {_quoted(point)},\n" for point in each.entry_points)
        tables.append("\n".join([*lines, f"entry_points = [\n{points}]\n"]))
    return "\n".join(tables)


def as_json_text(locked: Mapping[str, Locked]) -> str:
    """Return a lock for other programs."""
    return (
        json.dumps({name: dataclasses.asdict(each) for name, each in locked.items()}, indent=2)
        + "\n"
    )


def _parse(text: str) -> dict[str, Locked]:
    """Read the text of a lock. Raises ValueError, which names what is wrong."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"it is no TOML: {error}") from error
    if not tables:
        raise ValueError(
            "it locks nothing, as a file does that a `freeze` which failed was to write"
        )
    locked: dict[str, Locked] = {}
    for written, table in tables.items():
        name = normalise(written)  # as the package index compares names
        if name in locked:
            raise ValueError(f"[{written}] stands there twice")
        locked[name] = _locked(written, table)
    return locked


def _locked(name: str, table: object) -> Locked:
    if not isinstance(table, dict):
        raise ValueError(f"{name} is no table of a distribution")
    points = table.get("entry_points")
    texts = {field: value for field, value in table.items() if field != "entry_points"}
    fields = [each.name for each in dataclasses.fields(Locked)]
    if lacking := [each for each in fields if each not in {**table, "editable": ""}]:
        raise ValueError(f"[{name}] lacks {' and '.join(lacking)}")
    if surplus := sorted(table.keys() - fields):
        raise ValueError(
            f"[{name}] has {' and '.join(surplus)}, which this version knows nothing of"
        )
    if not isinstance(points, list) or not all(
        isinstance(each, str) for each in (*points, *texts.values())
    ):
        raise ValueError(f"[{name}] must have a list of texts as its entry_points, and else texts")
    return Locked(**texts, entry_points=tuple(points))


def _quoted(value: str) -> str:
    """Return a string of TOML, whose escapes are those of JSON."""
    return json.dumps(value, ensure_ascii=False)
