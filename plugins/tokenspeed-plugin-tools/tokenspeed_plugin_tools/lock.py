"""What is installed beside `plugins.lock`: whose plugins may be imported, at which version, with what content."""

from __future__ import annotations

import csv
import hashlib
import os
import shlex
from base64 import urlsafe_b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import distributions
from itertools import groupby
from pathlib import Path

from tokenspeed_core.commands import VARIABLE, Catalog, Entry, Selection, Status
from tokenspeed_plugin_tools.lock_file import Locked, LockError, freezing, read_lock

_OF_METADATA = (
    "METADATA",
    "entry_points.txt",
)  # installers write the rest of a .dist-info, each in its own way


def freeze(entries: Iterable[Entry]) -> dict[str, Locked]:
    """Describe the distributions of the usable entries, sorted by name. Reads all their files, imports none.

    Of one whose code is gone the hash is "".
    """
    usable = (entry for entry in entries if entry.status is Status.OK)
    return {
        name: _lock(list(group))
        for name, group in groupby(usable, key=lambda entry: entry.distribution)
    }


def enforce(path: str, entries: Sequence[Entry]) -> dict[str, str]:
    """Return the content's hash of each distribution in a lock that is met; this is what `--plugins-lock` calls.

    Raises LockError, which names every mismatch and what mends it.
    """
    locked = read_lock(path)
    lines = mismatches(locked, entries)
    if lines:
        raise LockError(
            "\n".join(
                [
                    f"plugins lock {path}: what is installed is not what was locked, so no plugin is imported",
                    *(f"  {line}" for line in lines),
                    f"where that is meant: `{_selecting(entries)}{freezing(path)}`",
                ]
            )
        )
    return {name: each.sha256 for name, each in locked.items()}


def enforce_environment() -> None:
    """Raise LockError where the lock of the environment is not met: then nothing may be imported."""
    selection = Selection.read()
    if selection.lock is not None:
        enforce(selection.lock, Catalog.discover(selection, check=False).all())


def installed_now() -> tuple[Entry, ...]:
    """Return the entries as the environment selects them, whatever its lock says. Imports nothing."""
    return Catalog.discover(replace(Selection.read(), lock=None)).all()


def mismatches(locked: Mapping[str, Locked], entries: Sequence[Entry]) -> list[str]:
    """Return what is not as a lock says, each with what mends it. Reads files, imports nothing."""
    found = freeze(entries)
    return [
        line
        for name in sorted({*locked, *found})
        for line in _mismatches(name, locked, found, entries)
    ]


def _selecting(entries: Iterable[Entry]) -> str:
    """Return how a command's plugins were selected, as it is typed before another one, which then sees the same."""
    text = os.environ.get(VARIABLE)
    if any(
        entry.reason.endswith("--no-plugins") for entry in entries
    ):  # to name a default one selects these alone
        excluded = sorted(f"-{each}" for each in Selection.read().excluded)
        text = ",".join(["tokenspeed-plugin-tools", *excluded] if excluded else [])
    return "" if text is None else f"{VARIABLE}={shlex.quote(text) if text else ''} "


def _mismatches(
    name: str, locked: Mapping[str, Locked], found: Mapping[str, Locked], entries: Sequence[Entry]
) -> Iterator[str]:
    mine = [entry for entry in entries if entry.distribution == name]
    if name not in locked:
        without = Selection.read().without(name)  # as whoever reads the line has it set
        yield f"{name} {found[name].version} is not locked; `pip uninstall {name}` or {without} goes without it"
        return
    was = locked[name]
    what = f"-e {was.editable}" if was.editable else f"{name}=={was.version}"
    again = f"`pip install --force-reinstall --no-deps {what}`"
    if name not in found:
        reasons = dict.fromkeys(map(_unusable, mine))
        yield f"{name} {was.version} is {'; '.join(reasons) or f'not installed; {again}'}"
        return
    now = found[name]
    if now.version != was.version:
        yield f"{name} is {now.version}, locked is {was.version}; {again}"
    elif not now.sha256:
        yield f"{name} {now.version} has lost its code, only metadata is left in {mine[0].root}; {again}"
    elif now.editable != was.editable:
        yield f"{name} is {_form(now)}, locked is {_form(was)}; {again}"
    else:
        unusable = {
            _point(entry): _unusable(entry) for entry in mine if entry.status is not Status.OK
        }
        for point in sorted({*now.entry_points} ^ {*was.entry_points}):
            which = (
                unusable.get(point)
                or f"{'gone' if point in was.entry_points else 'not locked'}; {again}"
            )
            yield f"{name} {now.version}: {point} is {which}"
        if now.sha256 != was.sha256:
            mend = f"restore what is under {was.editable}" if was.editable else again
            yield f"{name} {now.version} has changed: {_changes(mine)}; {mend}"


def _unusable(entry: Entry) -> str:
    """Say why an entry cannot be used, and what to do about it."""
    by_user = "take that back, or freeze without it"
    mend = (
        by_user
        if entry.status is Status.DISABLED
        else "`tokenspeed plugins doctor` has what mends it"
    )
    return f"{entry.status}: {entry.reason}; {mend}"


def _point(entry: Entry) -> str:
    return f"{entry.kind} {entry.name} = {entry.value}"


def _form(locked: Locked) -> str:
    return f"an editable install of {locked.editable}" if locked.editable else "no editable install"


def _lock(group: Sequence[Entry]) -> Locked:
    first = group[0]
    lines = "\n".join(f"{file} {digest}" for file, digest in sorted(_contents(group).items()))
    is_gone = any(entry.source() is None for entry in group)
    sha256 = "" if is_gone else hashlib.sha256(lines.encode()).hexdigest()
    return Locked(first.version, sha256, tuple(sorted(map(_point, group))), first.editable)


def _contents(group: Sequence[Entry]) -> dict[str, str]:
    """Return a digest for each file of a distribution, "" for one that is gone.

    These are the files that its RECORD lists, and all that stand in its packages, listed or not. Bytecode and
    what installers write for themselves are left out: they differ where the distribution does not.
    """
    home = Path(group[0].root).resolve()
    files = {file: home / file for file in _recorded(group[0]) if not file.startswith("..")}
    for source in {source for entry in group if (source := entry.source()) is not None}:
        for path in source.rglob("*") if source.is_dir() else (source,):
            if path.is_file():
                files[os.path.relpath(path, home)] = path
    return {
        file: _digest(path.read_bytes()) if path.is_file() else ""
        for file, path in files.items()
        if "__pycache__" not in path.parts
        and (path.parent.suffix != ".dist-info" or path.name in _OF_METADATA)
    }


def _recorded(entry: Entry) -> dict[str, str]:
    """Return the files that the distribution's RECORD lists, and the digest of each that it tells."""
    copies = distributions(name=entry.distribution, path=[entry.root])
    record = next(
        (copy.read_text("RECORD") for copy in copies if copy.version == entry.version), None
    )
    return {
        file: digest.removeprefix("sha256=")
        for file, digest, _ in csv.reader((record or "").splitlines())
    }


def _digest(content: bytes) -> str:
    """Return the SHA-256 as RECORD writes it."""
    return urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def _changes(group: Sequence[Entry]) -> str:
    """Name the files that are not as RECORD lists them. Only a few: it may be all of them."""
    if group[0].editable:
        return "its files"
    recorded = _recorded(group[0])
    changed = [
        file
        for file, digest in sorted(_contents(group).items())
        if recorded.get(file) not in ("", digest)
    ]
    return (
        ", ".join(changed[:3]) + ", ..." * (len(changed) > 3)
        or "it is another build of that version"
    )
