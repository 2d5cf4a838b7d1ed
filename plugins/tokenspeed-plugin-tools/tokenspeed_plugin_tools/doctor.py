"""`tokenspeed plugins doctor`: find broken installations, and how to repair them."""

from __future__ import annotations

import json
import shlex
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distributions, version
from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer
from packaging.requirements import InvalidRequirement, Requirement

from tokenspeed_core import TokenSpeedError
from tokenspeed_core.commands import VARIABLE, Catalog, Entry, Selection, Status, normalize
from tokenspeed_plugin_tools.installed import (
    GROUP,
    editable_folder,
    metadata_of,
    source,
    unreadable,
)
from tokenspeed_plugin_tools.lock import mismatches
from tokenspeed_plugin_tools.lock_file import LockError, read_lock
from tokenspeed_plugin_tools.preflight import build_mismatch, misplaced, replaced
from tokenspeed_plugin_tools.probe import Probe, probe
from tokenspeed_plugin_tools.text import printable


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem of a distribution, and how to repair it. A note needs no action."""

    distribution: str
    problem: str
    repair: str
    is_note: bool = False


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    no_plugins: Annotated[
        bool, typer.Option("--no-plugins", help="Import default distributions only.")
    ] = False,
) -> int:
    """Check every installed plugin, and import the enabled ones in another process; return 1 if any is broken.

    If the lock of the environment is not met, none is imported.
    """
    found = list(_metadata_findings())
    try:
        selection = Selection.read(no_plugins=no_plugins)
        entries = Catalog.discover(selection, check=False).all()
    except TokenSpeedError as error:
        found.append(Finding(VARIABLE, str(error), f"correct or unset {VARIABLE}"))
        selection = Selection(frozenset())
        entries = Catalog.discover(selection, check=False).all()
    for _, group in groupby(entries, key=lambda entry: entry.distribution):
        found += _distribution_findings(list(group))
    lock_findings = list(_lock_findings(selection.lock, entries))
    found += lock_findings
    if not lock_findings:
        broken = {each.distribution for each in found if not each.is_note}
        found += _probe_findings(probe([e for e in entries if e.distribution not in broken]))
    found.sort(key=lambda each: (each.is_note, each.distribution))
    problems = [each for each in found if not each.is_note]
    if as_json:
        record = {"is_healthy": not problems, "findings": [asdict(each) for each in found]}
        print(json.dumps(record, indent=2))
    else:
        print(printable(_report(found, len(entries))))
    return 1 if problems else 0


def _report(found: Sequence[Finding], num_plugins: int) -> str:
    """Return the findings by distribution, problems first."""
    num_notes = sum(each.is_note for each in found)
    lines = [f"{num_plugins} plugins: {len(found) - num_notes} problems, {num_notes} notes"]
    for name, group in groupby(found, key=lambda each: each.distribution):
        lines += ["", name]
        for each in group:
            prefix = "note: " if each.is_note else ""
            lines += [f"  {prefix}{each.problem}", f"  -> {each.repair}"]
    return "\n".join(lines)


def _metadata_findings() -> Iterator[Finding]:
    """Yield unreadable metadata and second copies of a distribution."""
    for folder, reason in unreadable(distributions()):
        name = normalize(folder.name.partition("-")[0])
        repair = f"rm -r {shlex.quote(str(folder))}, then install {name} again"
        yield Finding(name, f"cannot read the metadata in {folder}: {reason}", repair)
    first: dict[str, Path] = {}
    for each in distributions():
        try:
            is_plugin = GROUP in (each.read_text("entry_points.txt") or "")
            name = normalize(each.metadata["Name"])
        except Exception:  # reported above
            continue
        if not is_plugin:
            continue
        root = Path(str(each.locate_file("")))
        if name not in first:
            first[name] = root
        elif first[name] != root:
            problem = f"installed twice: {first[name]} is used, {root} is not"
            yield Finding(
                name, problem, f"run `pip uninstall {name}` until none is left, then install it"
            )


def _outdated(entries: Sequence[Entry], distribution: Distribution | None) -> str:
    """Return the entry points that an editable install's pyproject.toml has changed, "" if there are none."""
    project = Path(editable_folder(entries[0]) or "/nowhere")
    try:
        table = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    except (OSError, ValueError, KeyError):
        return ""
    if distribution is None or "entry-points" in table.get("dynamic", ()):
        return ""
    installed = {(point.group, point.name, point.value) for point in distribution.entry_points}
    written = {
        (group, point, value)
        for group, points in table.get("entry-points", {}).items()
        for point, value in points.items()
    }
    changed = {each for each in written ^ installed if each[0].startswith(GROUP)}
    return ", ".join(sorted({point for _, point, _ in changed}))


def _distribution_findings(entries: Sequence[Entry]) -> Iterator[Finding]:
    """Yield the problems that metadata and files of a distribution show."""
    first = entries[0]
    name = first.distribution
    distribution = metadata_of(first)
    reinstall = f"pip install --force-reinstall {name}=={first.version}"
    remove = f"pip uninstall {name}, or set {VARIABLE}=-{name}"
    if any(source(entry) is None for entry in entries):
        yield Finding(name, f"its code is missing: {first.value.partition(':')[0]}", reinstall)
        return
    for line in (distribution.requires if distribution is not None else None) or ():
        if problem := _unmet(line):
            yield Finding(name, problem, f"pip install '{line.partition(';')[0].strip()}'")
    if problem := build_mismatch(distribution):
        yield Finding(name, problem, reinstall)
    if changed := _outdated(entries, distribution):
        folder = editable_folder(first)
        problem = f"entry points changed in {folder}/pyproject.toml since the install: {changed}"
        yield Finding(name, problem, f"pip install -e {shlex.quote(folder)}")
    for entry in entries:
        if entry.status is Status.INCOMPATIBLE:
            problem = f"{entry.kind} {entry.name}: {entry.reason}"
            yield Finding(name, problem, f"pip install --upgrade tokenspeed-core {name}")
        elif entry.status is Status.FAILED:
            problem, _, repair = entry.reason.partition(". ")
            yield Finding(name, problem, repair)
        elif entry.status is Status.OK and (problem := misplaced(entry) or replaced(entry)):
            yield Finding(name, f"{entry.kind} {entry.name}: {problem}", remove)


def _unmet(line: str) -> str:
    """Return why a requirement is not met, "" if it is. The core checks its own range."""
    try:
        needed = Requirement(line)
    except InvalidRequirement:
        return f"invalid requirement: {line}"
    if normalize(needed.name) == "tokenspeed-core":
        return ""
    if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
        return ""
    try:
        found = version(needed.name)
    except PackageNotFoundError:
        return f"requires {needed.name}, which is not installed"
    if not needed.specifier.contains(found, prereleases=True):
        return f"requires {needed.name}{needed.specifier}, found {found}"
    return ""


def _lock_findings(path: str | None, entries: Sequence[Entry]) -> Iterable[Finding]:
    """Return the differences from the lock of the environment."""
    if path is None:
        return []
    try:
        lines = mismatches(read_lock(path), entries)
    except LockError as error:
        return [Finding(f"{VARIABLE}_LOCK", str(error), "write the lock again")]
    return [Finding(f"{VARIABLE}_LOCK", *_split(line)) for line in lines]


def _split(line: str) -> tuple[str, str]:
    problem, _, repair = line.rpartition(": ")
    return problem, repair


def _probe_findings(probed: Mapping[Entry, Probe]) -> Iterator[Finding]:
    """Yield the problems of importing the plugins."""
    for entry, found in probed.items():
        name = entry.distribution
        what = f"{entry.kind} {entry.name}"
        if found.error:
            repair = f"fix or upgrade {name}, or set {VARIABLE}=-{name}"
            yield Finding(name, f"{what} fails: {found.error}", repair)
        for need in found.needs:
            if not need.is_installed:
                repair = need.obtain or f"install the distribution that provides {need.module}"
                yield Finding(name, f"{what} needs the module {need.module}", repair, is_note=True)
        if found.heavy:
            libraries = ", ".join(found.heavy)
            problem = f"{what} imports {libraries} with its descriptor ({found.seconds:.1f} s)"
            repair = "import it in the module that the descriptor loads"
            yield Finding(name, problem, repair, is_note=True)
