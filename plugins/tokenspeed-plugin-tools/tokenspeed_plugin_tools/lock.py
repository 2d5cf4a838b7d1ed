"""Compares the installed plugins with a lock file. Reads their files, imports none of them."""

from __future__ import annotations

import csv
import hashlib
import os
import shlex
from base64 import urlsafe_b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from tokenspeed_core.commands import VARIABLE, Catalog, Entry, Selection, Status
from tokenspeed_plugin_tools.installed import editable_folder, metadata_of, source
from tokenspeed_plugin_tools.lock_file import Locked, LockError, read_lock

# The files of a .dist-info folder that every installer writes with the same content.
_METADATA_FILES = ("METADATA", "entry_points.txt")


def freeze(entries: Iterable[Entry]) -> dict[str, Locked]:
    """Return the lock of the usable entries' distributions, by name. `sha256` is "" if their code is missing."""
    usable = (entry for entry in entries if entry.status is Status.OK)
    return {
        name: _lock(list(group))
        for name, group in groupby(usable, key=lambda entry: entry.distribution)
    }


def enforce(path: str, entries: Sequence[Entry]) -> dict[str, str]:
    """Return the digests of locked distributions. Raises LockError with every mismatch."""
    locked = read_lock(path)
    lines = mismatches(locked, entries)
    if lines:
        problems = "".join(f"\n  {line}" for line in lines)
        raise LockError(
            f"plugin lock {path}: the installed plugins do not match, so none is imported{problems}\n"
            f"If this is intended, run `tokenspeed plugins freeze -o {shlex.quote(path)}`."
        )
    return {name: each.sha256 for name, each in locked.items()}


def enforce_environment() -> None:
    """Raise LockError if TOKENSPEED_PLUGINS_LOCK names a lock that is not met."""
    selection = Selection.read()
    if selection.lock is not None:
        enforce(selection.lock, Catalog.discover(selection, check=False).all())


def installed_now() -> tuple[Entry, ...]:
    """Return the entries that the environment selects, without its lock."""
    return Catalog.discover(replace(Selection.read(), lock=None), check=False).all()


def mismatches(locked: Mapping[str, Locked], entries: Sequence[Entry]) -> list[str]:
    """Return one line for each difference from a lock, with how to repair it."""
    found = freeze(entries)
    return [
        line
        for name in sorted({*locked, *found})
        for line in _mismatches(name, locked, found, entries)
    ]


def _mismatches(
    name: str, locked: Mapping[str, Locked], found: Mapping[str, Locked], entries: Sequence[Entry]
) -> Iterator[str]:
    mine = [entry for entry in entries if entry.distribution == name]
    if name not in locked:
        yield (
            f"{name} {found[name].version} is not locked: "
            f"run `pip uninstall {name}` or set {VARIABLE}=-{name}"
        )
        return
    expected = locked[name]
    what = f"-e {expected.editable}" if expected.editable else f"{name}=={expected.version}"
    repair = f"run `pip install --force-reinstall --no-deps {what}`"
    if name not in found:
        reasons = sorted({f"{entry.status}: {entry.reason}" for entry in mine})
        yield f"{name} {expected.version} is {'; '.join(reasons) or f'not installed: {repair}'}"
        return
    now = found[name]
    if now.version != expected.version:
        yield f"{name} is {now.version}, locked is {expected.version}: {repair}"
    elif not now.sha256:
        yield f"{name} {now.version}: the code is missing: {repair}"
    elif now.editable != expected.editable:
        yield f"{name} {now.version} is {_form(now)}, locked is {_form(expected)}: {repair}"
    elif now.entry_points != expected.entry_points:
        points = sorted({*now.entry_points} ^ {*expected.entry_points})
        yield f"{name} {now.version}: entry points differ: {', '.join(points)}: {repair}"
    elif now.sha256 != expected.sha256:
        if expected.editable:
            repair = f"restore the files in {expected.editable}"
        yield f"{name} {now.version}: files changed: {_changed_files(mine)}: {repair}"


def _form(locked: Locked) -> str:
    return f"an editable install of {locked.editable}" if locked.editable else "a regular install"


def _lock(group: Sequence[Entry]) -> Locked:
    first = group[0]
    files = sorted(_contents(group).items())
    lines = "\n".join(f"{file} {digest}" for file, digest in files)
    is_missing = any(source(entry) is None for entry in group)
    sha256 = "" if is_missing else hashlib.sha256(lines.encode()).hexdigest()
    points = sorted(f"{entry.kind} {entry.name} = {entry.value}" for entry in group)
    return Locked(first.version, sha256, tuple(points), editable_folder(first))


def _contents(group: Sequence[Entry]) -> dict[str, str]:
    """Return a digest for each file of a distribution, "" for a missing one.

    These are the files in its RECORD and all files in its packages, without bytecode and without the
    files that installers write for themselves.
    """
    home = Path(group[0].root).resolve()
    files = {file: home / file for file in _recorded(group[0]) if not file.startswith("..")}
    for folder in {found for entry in group if (found := source(entry)) is not None}:
        for path in folder.rglob("*") if folder.is_dir() else (folder,):
            if path.is_file():
                files[os.path.relpath(path, home)] = path
    return {
        file: _digest(path.read_bytes()) if path.is_file() else ""
        for file, path in files.items()
        if "__pycache__" not in path.parts
        and (path.parent.suffix != ".dist-info" or path.name in _METADATA_FILES)
    }


def _recorded(entry: Entry) -> dict[str, str]:
    """Return the files in a distribution's RECORD with their digests."""
    distribution = metadata_of(entry)
    record = distribution.read_text("RECORD") if distribution is not None else None
    return {
        file: digest.removeprefix("sha256=")
        for file, digest, _ in csv.reader((record or "").splitlines())
    }


def _digest(content: bytes) -> str:
    """Return the SHA-256 in the format of RECORD."""
    return urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def _changed_files(group: Sequence[Entry]) -> str:
    """Return the first files that differ from RECORD."""
    recorded = _recorded(group[0])
    changed = [
        file
        for file, digest in sorted(_contents(group).items())
        if recorded.get(file) not in ("", digest)
    ]
    if len(changed) > 3:
        changed = [*changed[:3], "..."]
    return ", ".join(changed) or "another build of this version"
