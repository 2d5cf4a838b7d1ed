"""Reads plugins from the metadata of installed distributions. Imports none of them."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from email import message_from_string
from functools import cache
from importlib.metadata import Distribution, EntryPoint
from urllib.parse import unquote, urlparse

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet

from tokenspeed_core.errors import PluginError, describe_error, suggest
from tokenspeed_core.plugins.entry import Entry, Status
from tokenspeed_core.plugins.kinds import GROUP_PREFIX, KINDS, kind_of
from tokenspeed_core.plugins.selection import DEFAULTS, Selection, normalize

logger = logging.getLogger("tokenspeed.plugins.metadata")


def read_entries(
    found: Iterable[Distribution], selection: Selection, core_version: str, *, strict: bool
) -> list[Entry]:
    """Return the entries of all `tokenspeed.*` groups, by distribution, then kind, then name.

    `found` is in the order of `sys.path`; of two copies of a distribution, the first counts. Metadata
    that cannot be read is logged and skipped. Raises PluginError if the selection names a distribution
    without plugins, and with `strict` if metadata cannot be read.
    """
    entries: dict[tuple[str, str, str], Entry] = {}
    first_copies: dict[str, Distribution] = {}
    for distribution in found:
        try:
            if GROUP_PREFIX not in (distribution.read_text("entry_points.txt") or ""):
                continue
            offered = list(_entries_of(distribution, selection, core_version))
        except Exception as error:  # another distribution's metadata may contain anything
            folder = metadata_folder(distribution)
            name = normalize(os.path.basename(folder).partition("-")[0])
            if strict and not selection.refusal([name]):
                raise PluginError(
                    f"cannot read plugin metadata in {folder}: {describe_error(error)}. "
                    f"Remove the folder and install {name} again."
                ) from error
            _warn_unreadable(folder)
            continue
        for entry in offered:
            if first_copies.setdefault(entry.distribution, distribution) is distribution:
                entries.setdefault((entry.distribution, entry.kind, entry.name), entry)
    selection.check({scope for entry in entries.values() for scope in entry.scopes})
    return [entries[key] for key in sorted(entries)]


@cache
def _warn_unreadable(folder: str) -> None:
    """Log once per process that metadata cannot be read."""
    logger.warning(
        "cannot read plugin metadata in %s. Run `tokenspeed plugins doctor` for details.", folder
    )


def metadata_folder(distribution: Distribution) -> str:
    """Return the folder that holds a distribution's metadata."""
    # Python has no public attribute for it.
    return str(getattr(distribution, "_path", "") or distribution.locate_file(""))


def _entries_of(
    distribution: Distribution, selection: Selection, core_version: str
) -> Iterator[Entry]:
    text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
    name, version, requires = _headers(text)
    if not name or not version:
        raise ValueError("METADATA has no name or no version")
    requires_core = _core_range(requires or tuple(distribution.requires or ()))
    origin = _origin(distribution)
    root = str(distribution.locate_file(""))
    for point in distribution.entry_points:
        if not point.group.startswith(GROUP_PREFIX):
            continue
        entry = Entry(
            kind=point.group.removeprefix(GROUP_PREFIX),
            name=point.name,
            value=point.value.partition("[")[0].strip(),
            api=_api(point),
            distribution=normalize(name),
            version=version,
            requires_core=requires_core,
            status=Status.OK,
            reason="",
            origin=origin,
            root=root,
        )
        if refusal := selection.refusal(entry.scopes):
            entry = replace(entry, status=Status.DISABLED, reason=refusal)
        elif error := _compatibility_error(entry, core_version):
            entry = replace(entry, status=Status.INCOMPATIBLE, reason=error)
        yield entry


@cache  # by content: a command reads the metadata of all distributions several times
def _headers(text: str) -> tuple[str | None, str | None, tuple[str, ...]]:
    """Return the name, the version and the requirements in a distribution's METADATA."""
    message = message_from_string(text)
    return message["Name"], message["Version"], tuple(message.get_all("Requires-Dist") or ())


def _compatibility_error(entry: Entry, core_version: str) -> str:
    """Return why an entry does not fit this core, "" if it does."""
    kind = kind_of(entry.kind)
    if kind is None:
        return f"unknown plugin kind {entry.kind!r}{suggest(entry.kind, KINDS)}"
    if entry.api is None:
        return f"the entry point declares no api version, such as `{entry.value} [api{kind.api}]`"
    if entry.api != kind.api:
        older = "tokenspeed-core" if entry.api > kind.api else entry.distribution
        return f"needs api {entry.api} of {entry.kind}, this core has {kind.api}: upgrade {older}"
    if not SpecifierSet(entry.requires_core).contains(core_version, prereleases=True):
        return f"needs tokenspeed-core {entry.requires_core}, found {core_version}"
    if entry.distribution in DEFAULTS:
        return ""
    if kind.is_default_only:
        return f"plugins of kind {entry.kind} are accepted from default distributions only"
    if entry.name in kind.built_in:
        return f"the name {entry.name} is reserved"
    is_typable = entry.name.isprintable() and not set(entry.name) & set(" ,")
    if kind.is_unique and (entry.name.startswith("-") or not is_typable):
        return f"the name {entry.name!r} cannot be typed as a flag's value"
    return ""


def _origin(distribution: Distribution) -> str:
    """Return where pip installed a distribution from, according to its record of direct installs."""
    record = json.loads(distribution.read_text("direct_url.json") or "{}")
    url = str(record.get("url", ""))
    path = unquote(urlparse(url).path) if url.startswith("file:") else url
    if record.get("dir_info", {}).get("editable"):
        return f"editable {path}"
    return path or "installed"


def _api(point: EntryPoint) -> int | None:
    """Return the number in the extra `[api1]`."""
    for extra in point.extras:
        number = extra.removeprefix("api")
        if number != extra and number.isdecimal():
            return int(number)
    return None


@cache
def _core_range(lines: tuple[str, ...]) -> str:
    """Return the version specifier of tokenspeed-core that applies to this machine."""
    specifiers = []
    for line in lines:
        with suppress(InvalidRequirement):
            needed = Requirement(line)
            is_active = needed.marker is None or needed.marker.evaluate({"extra": ""})
            if is_active and normalize(needed.name) == "tokenspeed-core":
                specifiers.append(str(needed.specifier))
    return ",".join(filter(None, specifiers))
