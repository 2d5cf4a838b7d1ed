"""Reads the plugins of the installed distributions from their metadata, importing none of them."""

from __future__ import annotations

import json
import logging
import os
import site
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from importlib.metadata import (
    Distribution,
    EntryPoint,
    PackageNotFoundError,
    distributions,
    version,
)
from urllib.parse import unquote, urlparse

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.tags import sys_tags

from tokenspeed_core.errors import PluginError, describe_error
from tokenspeed_core.plugins.entry import Entry, Status
from tokenspeed_core.plugins.kinds import GROUP_PREFIX, KERNELS_PREFIX, KINDS, kind_of
from tokenspeed_core.plugins.selection import DEFAULTS, Selection, normalise

logger = logging.getLogger("tokenspeed.plugins.metadata")
_NO_USE = "this core does not use plugins of this kind yet"
_MISPLACED = (
    "it is in the working directory, from which nothing is loaded; `pip install .` installs it"
)


def read_entries(
    found: Iterable[Distribution], selection: Selection, core: str, *, strict: bool
) -> list[Entry]:
    """Return every `tokenspeed.*` entry, by distribution name, then kind, then entry name.

    `core` is this core's version. Those `found` come in the order of `sys.path`: a second copy of one is shadowed by
    the first. Those in the working directory come last, and are not used: whoever starts a program somewhere has not
    installed what is there.
    Raises PluginError where the selection names a distribution that provides no plugin, and where it is `strict` for
    metadata that cannot be read, unless it is of what is left out anyway.
    """
    entries: dict[tuple[str, str, str, str], Entry] = {}
    firsts: dict[str, tuple[Distribution, str]] = {}
    for distribution in sorted(found, key=lambda each: _is_working_directory(_root(each))):
        try:
            offers = GROUP_PREFIX in (distribution.read_text("entry_points.txt") or "")
            offered = list(_entries_of(distribution, selection, core)) if offers else []
        except (
            Exception
        ) as error:  # metadata may be anything, and one distribution's must not take all down
            folder = metadata_folder(distribution)
            name = normalise(os.path.basename(folder).partition("-")[0])
            if (
                strict
                and not selection.refusal([name])
                and not _is_working_directory(_root(distribution))
            ):
                what = f"{folder} cannot be read: {describe_error(error)}; --strict-plugins ends the start for it"
                raise PluginError(
                    f"{what}; remove that folder, then install {name} again"
                ) from error
            _leave_out(folder)
            continue
        for entry in offered:
            first, version = firsts.setdefault(entry.distribution, (distribution, entry.version))
            key = (
                entry.distribution,
                entry.kind,
                entry.name,
                "" if first is distribution else entry.version,
            )
            if first is not distribution:
                if entries.get((*key[:3], "")) == entry:
                    continue  # the same metadata, reached by two paths
                reason = f"{entry.distribution} {version} comes first on sys.path"
                entry = replace(entry, status=Status.SHADOWED, reason=reason)
            entries.setdefault(key, entry)
    selection.check({scope for entry in entries.values() for scope in entry.scopes})
    return list(_mark_unused([entries[key] for key in sorted(entries)]))


def _mark_unused(entries: Collection[Entry]) -> Iterator[Entry]:
    """Yield the entries; those of kinds that this core does not ask for are marked: they would have no effect."""
    has_ops = any(entry.kind == "ops" and entry.status is Status.OK for entry in entries)
    for entry in entries:
        kind, is_kernel = kind_of(entry.kind), entry.kind.startswith(KERNELS_PREFIX)
        is_used = (kind is not None and kind.is_used) or (is_kernel and has_ops)
        reason = _NO_USE + ": it has no op of the family, and no plugin brings ops" * is_kernel
        yield (
            entry
            if is_used or entry.status is not Status.OK
            else replace(entry, status=Status.UNUSED, reason=reason)
        )


@cache
def _leave_out(folder: str) -> None:
    """Say that metadata cannot be read, once in a process, which may look at what is installed more than once."""
    logger.warning(
        "%s cannot be read: what plugins it has are left out; `tokenspeed plugins doctor`", folder
    )


def _entries_of(
    distribution: Distribution, selection: Selection, core_version: str
) -> Iterator[Entry]:
    metadata, origin, root = (
        distribution.metadata,
        _origin(distribution),
        _root(distribution),
    )  # slow, so done once
    name, version = metadata["Name"], metadata["Version"]
    if not name or not version:
        raise ValueError("METADATA lacks a name or a version")
    needed = _requirements(metadata.get_all("Requires-Dist") or distribution.requires)
    ranges = [str(each.specifier) for each in needed if normalise(each.name) == "tokenspeed-core"]
    for point in distribution.entry_points:
        if not point.group.startswith(GROUP_PREFIX):
            continue
        entry = Entry(
            kind=point.group.removeprefix(GROUP_PREFIX),
            name=point.name,
            value=point.value.partition("[")[0].strip(),
            api=_api(point),
            distribution=normalise(name),
            version=version,
            origin=origin,
            root=root,
            requires_core=",".join(filter(None, ranges)),
            status=Status.OK,
            reason="",
        )
        if (
            refused := _MISPLACED
            if _is_working_directory(root)
            else selection.refusal(entry.scopes)
        ):
            entry = replace(entry, status=Status.DISABLED, reason=refused)
        elif misfit := _misfit(entry, core_version):
            entry = replace(entry, status=Status.INCOMPATIBLE, reason=misfit)
        yield entry


def _misfit(entry: Entry, core_version: str) -> str:
    """Return why an entry does not fit this core, "" when it does."""
    kind = kind_of(entry.kind)
    if kind is None:
        near = get_close_matches(entry.kind, KINDS, n=1)
        return f"no kind {entry.kind!r} here" + (
            f"; did its author mean {near[0]}?" if near else ""
        )
    if entry.api is None:
        return f"names no api; its author writes `{entry.value} [api{kind.api}]`"
    if entry.api != kind.api:
        which = (
            "upgrade tokenspeed-core" if entry.api > kind.api else f"upgrade {entry.distribution}"
        )
        return f"needs api {entry.api} of {entry.kind}, this core has {kind.api}: {which}"
    if not SpecifierSet(entry.requires_core).contains(core_version, prereleases=True):
        return f"needs tokenspeed-core {entry.requires_core}, this is {core_version}"
    if kind.is_default_only and entry.distribution not in DEFAULTS:
        return f"only the default distributions have {entry.kind}"
    if kind.is_named and (
        entry.name.startswith("-") or not entry.name.isprintable() or set(entry.name) & set(" ,")
    ):
        return (
            f"the name {entry.name!r} is none that a user can type; its author must choose another"
        )
    if entry.name in kind.built_in and entry.distribution not in DEFAULTS:
        return f"the name {entry.name} is built in; its author must choose another"
    return ""


def _api(point: EntryPoint) -> int | None:
    """Return the number in the extra `[api1]`."""
    named = (extra.removeprefix("api") for extra in point.extras if extra.startswith("api"))
    return next((int(number) for number in named if number.isdecimal()), None)


def _requirements(lines: Iterable[str] | None) -> Iterator[Requirement]:
    """Yield what a distribution requires on this machine, of all that its metadata has, without its extras."""
    for line in lines or ():
        with suppress(
            InvalidRequirement
        ):  # pip refuses to install these; only a hand-made record has one
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                yield requirement


def check_build(name: str) -> None:
    """Compare what a distribution of compiled code was built for with what is here, before any of it is loaded.

    Raises ImportError for another Python or platform than its wheel's tags name, and for a package, such as torch, of
    another version than it requires: calling into either may end the process.
    """
    found = next(iter(distributions(name=name)), None)
    wheel = (found and found.read_text("WHEEL")) or ""
    if found is None or "Root-Is-Purelib: false" not in wheel:
        return
    tags = {line.removeprefix("Tag: ") for line in wheel.splitlines() if line.startswith("Tag: ")}
    if tags and tags.isdisjoint(map(str, sys_tags())):
        raise ImportError(
            f"{name} was built for {' or '.join(sorted(tags))}, and this is {next(sys_tags())}"
        )
    for each in _requirements(found.requires):
        with suppress(PackageNotFoundError):  # of what is missing, the import tells
            if not each.specifier.contains(here := version(each.name), prereleases=True):
                raise ImportError(
                    f"{name} was built for {each.name}{each.specifier}, and {here} is installed"
                )


def _root(distribution: Distribution) -> str:
    return str(distribution.locate_file(""))


def metadata_folder(distribution: Distribution) -> str:
    """Return the folder that holds the metadata, which tells one that cannot be read from its neighbours."""
    return str(
        getattr(distribution, "_path", "") or _root(distribution)
    )  # Python has no public name for it


def _is_working_directory(folder: str) -> bool:
    """Say whether a folder is the working directory, and none that Python itself installs into."""
    try:
        return os.path.samefile(folder or ".", ".") and folder not in site.getsitepackages()
    except OSError:  # one of the two is gone, or no folder
        return False


def _origin(distribution: Distribution) -> str:
    text = distribution.read_text("direct_url.json")
    if not text:
        return "installed"
    record = json.loads(text)
    url = str(record.get("url", ""))
    path = unquote(urlparse(url).path) if url.startswith("file:") else url
    return f"editable {path}" if record.get("dir_info", {}).get("editable") else path
