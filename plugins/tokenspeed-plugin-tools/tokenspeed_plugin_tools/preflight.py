"""Checks installed plugins before a start. Imports none of them.

The core calls `check` through the entry point of kind `preflight`.
"""

from __future__ import annotations

import os
import site
import sys
from collections.abc import Sequence
from importlib.metadata import Distribution, PackageNotFoundError, version

from packaging.requirements import InvalidRequirement, Requirement
from packaging.tags import sys_tags

from tokenspeed_core.commands import Entry, Preflight, Status
from tokenspeed_plugin_tools.installed import editable_folder, metadata_of, source
from tokenspeed_plugin_tools.lock import enforce


def check(entries: Sequence[Entry], lock: str | None) -> Preflight:
    """Return the entries that must not be imported, and the digests of locked distributions.

    Raises LockError if the installed plugins do not match the lock file.
    """
    digests = enforce(lock, entries) if lock is not None else {}
    builds: dict[tuple[str, str], str] = {}
    places: dict[tuple[str, str, str], str] = {}
    problems: dict[Entry, str] = {}
    for entry in entries:
        if entry.status is not Status.OK:
            continue
        # Many entries share a distribution or a module, and each search of `sys.path` takes time.
        key = entry.distribution, entry.root
        if key not in builds:
            builds[key] = build_mismatch(metadata_of(entry))
        place = entry.value.partition(":")[0], entry.root, entry.origin
        if place not in places:
            places[place] = misplaced(entry) or replaced(entry)
        problem = places[place] or builds[key]
        if problem:
            problems[entry] = problem
    return Preflight(problems, digests)


def misplaced(entry: Entry) -> str:
    """Return a message if the entry's metadata is in the working directory, else ""."""
    try:
        is_here = os.path.samefile(entry.root or ".", ".")
    except OSError:
        return ""
    if not is_here or entry.root in site.getsitepackages():
        return ""
    return "it is in the working directory; install it with `pip install .`"


def replaced(entry: Entry) -> str:
    """Return a message if another file would be imported in place of the entry's module, else "".

    This is a module of the same name earlier on `sys.path`.
    """
    module = entry.value.partition(":")[0]
    if not entry.root or module.partition(".")[0] in sys.modules:
        return ""
    found = source(entry)
    home = os.path.realpath(editable_folder(entry) or entry.root)
    if found is None or found.is_relative_to(home):
        return ""
    return f"module {module} would be imported from {found} instead of {home}"


def build_mismatch(distribution: Distribution | None) -> str:
    """Return a message if compiled code was built for another Python, platform or library, else "".

    Calling such code can end the process.
    """
    wheel = (distribution.read_text("WHEEL") if distribution is not None else None) or ""
    if distribution is None or "Root-Is-Purelib: false" not in wheel:
        return ""
    tags = {line.removeprefix("Tag: ") for line in wheel.splitlines() if line.startswith("Tag: ")}
    if tags and tags.isdisjoint(map(str, sys_tags())):
        return f"it was built for {', '.join(sorted(tags))}, this is {next(sys_tags())}"
    for line in distribution.requires or ():
        try:
            needed = Requirement(line)
            found = version(needed.name)
        except (InvalidRequirement, PackageNotFoundError):
            continue
        is_active = needed.marker is None or needed.marker.evaluate({"extra": ""})
        if is_active and not needed.specifier.contains(found, prereleases=True):
            return f"it was built for {needed.name}{needed.specifier}, found {found}"
    return ""
