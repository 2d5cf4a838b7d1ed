"""What can be wrong with installed plugins, each with the line that mends it."""

from __future__ import annotations

import importlib.util
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from tokenspeed_testing.distribution import build_misfit

from tokenspeed_core import __version__
from tokenspeed_core.commands import Entry, Selection, Status, normalise
from tokenspeed_plugin_tools.installed import GROUP, Finding, Installed
from tokenspeed_plugin_tools.lock import mismatches
from tokenspeed_plugin_tools.lock_file import LockError, read_lock
from tokenspeed_plugin_tools.probe import Probed, Stage


def of_metadata(installed: Sequence[Installed]) -> Iterator[Finding]:
    """Yield what is wrong that metadata and folders tell: code that is gone, unmet requirements, second copies."""
    first: dict[str, Installed] = {}
    for each in installed:
        if each.name in first:
            other = first[each.name]
            if other.root != each.root or other.version != each.version:
                yield _second(each, other)
            continue
        first[each.name] = each
        yield from _gone(each)
        yield from list(_unmet(each)) or _built(each)


def _second(behind: Installed, first: Installed) -> Finding:
    """Return what is wrong where a distribution is on the path twice: for an editable one, what a build left."""
    for left, used in ((behind, first), (first, behind)):
        egg_info = _egg_info(left)
        if (
            egg_info is not None
            and used.editable is not None
            and left.root.is_relative_to(used.editable)
        ):
            side = "behind" if left is behind else "ahead of"
            what = f"a build left {egg_info} on the path, {side} the editable install of {used.editable}"
            return Finding(
                left.name,
                left.version,
                what,
                f"rm -r {shlex.quote(str(egg_info))}",
                is_note=left is behind,
            )
    return Finding(
        behind.name,
        behind.version,
        f"installed twice: this copy in {behind.root} is behind {first.version} in {first.root}",
        f"pip uninstall -y {behind.name} until it says that none is installed, then pip install {behind.name}",
    )


def _egg_info(installed: Installed) -> Path | None:
    return next(installed.root.glob(f"{installed.name.replace('-', '[-_.]')}*.egg-info"), None)


def _gone(installed: Installed) -> Iterator[Finding]:
    modules = {
        point.value.partition(":")[0].partition("[")[0].strip().partition(".")[0]
        for point in installed.distribution.entry_points
        if point.group.startswith(GROUP)
    }
    for module in sorted(modules):
        try:
            is_there = importlib.util.find_spec(module) is not None
        except (ImportError, ValueError):
            is_there = False
        if is_there:
            continue
        leftover = _egg_info(installed)
        mend = f"rm -r {leftover}" if leftover else f"pip uninstall -y {installed.name}"
        what = f"only its metadata is left in {installed.root}: the module {module} is gone"
        if installed.editable is not None:
            what = f"it was installed from {installed.editable}, and the module {module} is not there any more"
            mend += f", or put it back and pip install -e {shlex.quote(str(installed.editable))}"
        yield Finding(installed.name, installed.version, what, mend, is_code_gone=True)


def _unmet(installed: Installed) -> Iterator[Finding]:
    for line in installed.distribution.requires or ():
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            yield Finding(
                installed.name,
                installed.version,
                f"it requires {line!r}, which is no requirement",
                f"pip uninstall -y {installed.name}",
            )
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if normalise(requirement.name) == "tokenspeed-core":
            continue  # that range is judged with the entries
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            found = ""
        if not found or not requirement.specifier.contains(found, prereleases=True):
            what = f"which is {found}" if found else "which is not installed"
            name = f"{requirement.name}{requirement.specifier}"
            yield Finding(
                installed.name,
                installed.version,
                f"it requires {name}, {what}",
                f"pip install '{name}'",
            )


def _built(installed: Installed) -> Iterator[Finding]:
    misfit = build_misfit(installed.name)
    if misfit:
        again = f"pip install --force-reinstall {installed.name}=={installed.version}"
        yield Finding(installed.name, installed.version, misfit, again)


def of_status(entries: Iterable[Entry]) -> Iterator[Finding]:
    """Yield what the core says of entries that it does not use."""
    for entry in entries:
        what = f"{entry.kind} {entry.name}: {entry.reason}"
        if entry.status is Status.INCOMPATIBLE:
            yield Finding(entry.distribution, entry.version, what, _upgrade(entry))
        elif entry.status is Status.FAILED:
            clash, _, mend = entry.reason.partition("; ")
            yield Finding(entry.distribution, entry.version, clash, mend)
        elif entry.status is Status.UNUSED:
            yield Finding(
                entry.distribution,
                entry.version,
                what,
                "nothing: a newer core may use it",
                is_note=True,
            )


def of_lock(entries: Sequence[Entry]) -> list[Finding]:
    """Return what is not as the environment's lock says; imports nothing."""
    path = Selection.read().lock
    if path is None:
        return []
    try:
        lines = mismatches(read_lock(path), entries)
    except LockError as error:
        lines = [str(error)]
    parts = [line.rpartition("; ") for line in lines]
    return [
        Finding("TOKENSPEED_PLUGINS_LOCK", "", f"no plugin is imported: {what}", mend)
        for what, _, mend in parts
    ]


def _upgrade(entry: Entry) -> str:
    is_range = entry.reason.startswith("needs tokenspeed-core")
    if "upgrade tokenspeed-core" in entry.reason or (is_range and _is_for_newer(entry)):
        return "pip install --upgrade tokenspeed-core"
    if is_range or f"upgrade {entry.distribution}" in entry.reason:
        return f"pip install --upgrade {entry.distribution}, or pip uninstall it"
    return f"pip uninstall {entry.distribution}, and tell its author"


def _is_for_newer(entry: Entry) -> bool:
    """Say whether the core that an entry asks for is newer than the one that is here."""
    bounds = (
        bound
        for bound in SpecifierSet(entry.requires_core)
        if bound.operator in (">", ">=", "~=", "==")
    )
    return any(
        Version(bound.version.removesuffix(".*")) >= Version(__version__) for bound in bounds
    )


def of_probes(probed: Mapping[Entry, Probed]) -> Iterator[Finding]:
    """Yield what importing the plugins showed."""
    selection = Selection.read()
    for entry, told in probed.items():
        what = f"{entry.kind} {entry.name}"
        without = selection.without(entry.scopes[2] if selection.only else entry.distribution)
        if told.error:
            how = "fails to import" if told.failed_in is Stage.IMPORT else "cannot be used"
            mend = _another(entry) if told.failed_in is Stage.START else _again(entry, told.error)
            yield Finding(
                entry.distribution,
                entry.version,
                f"{what} {how}: {told.error}",
                f"{mend}; {without} goes without it",
            )
        for target in told.dangling:
            yield Finding(
                entry.distribution,
                entry.version,
                f"{what} names {target}, whose module does not exist",
                _again(entry, ""),
            )
        for need in told.needs:
            if not need.is_installed:
                yield Finding(
                    entry.distribution,
                    entry.version,
                    f"{what} needs the module {need.module}, not installed",
                    need.obtain or f"install what provides {need.module}",
                    is_note=True,
                )
        if told.heavy:
            yield Finding(
                entry.distribution,
                entry.version,
                f"{what} imports {', '.join(told.heavy)} with its descriptor ({told.seconds:.1f} s at every start)",
                f"its author moves that import into the module that is loaded when it is chosen; {without} goes "
                "without it",
                is_note=True,
            )


def _again(entry: Entry, error: str) -> str:
    """Return the line that installs a distribution again, or what its import lacks."""
    _, missing, module = error.partition("No module named ")
    own = entry.value.partition(":")[0].partition(".")[0]
    if missing and not f"{module.strip(chr(39))}.".startswith(f"{own}."):
        return f"install what provides {module}, and tell its author to declare it"
    kind, _, folder = entry.origin.partition(" ")
    if kind == "editable":
        return f"mend what is in {folder}"
    if Path(entry.origin).is_dir():
        return f"mend what is in {entry.origin}, then pip install --force-reinstall {shlex.quote(entry.origin)}"
    if error.startswith(
        ("SyntaxError:", "IndentationError:", "TabError:")
    ):  # the same version has the same file
        return _another(entry)
    return f"pip install --force-reinstall {entry.distribution}=={entry.version}"


def _another(entry: Entry) -> str:
    return f"pip install '{entry.distribution}!={entry.version}' for another version, or tell its authors"
