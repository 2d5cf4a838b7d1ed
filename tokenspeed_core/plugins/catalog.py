"""The catalog: every plugin that is installed, read from metadata; imports only what is asked for."""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import FunctionType
from typing import Any, TypeVar

from tokenspeed_core import __version__
from tokenspeed_core.errors import PluginError, describe_error, printable, suggest
from tokenspeed_core.plugins.entry import Entry, Status, load_target
from tokenspeed_core.plugins.kinds import KERNELS_PREFIX, UNUSED, kind_of
from tokenspeed_core.plugins.metadata import read_entries
from tokenspeed_core.plugins.selection import DEFAULTS, VARIABLE, Selection

T = TypeVar("T")
logger = logging.getLogger("tokenspeed.plugins")
_of_metadata = logging.getLogger(
    "tokenspeed.plugins.metadata"
)  # of which a server's launcher alone speaks


class Catalog:
    """Entries in a fixed order: normalised distribution name, then kind, then entry name.

    Holds what was imported and what failed; everything else about an entry never changes.
    """

    def __init__(
        self, entries: Sequence[Entry], selection: Selection | None = None, *, strict: bool = False
    ) -> None:
        """`selection` is the one by which the entries were judged."""
        self._selection = selection or Selection()
        self._entries = tuple(_mark_conflicts(entries, self._selection))
        self._pinned: Mapping[str, str] | None = None
        self.is_strict = (
            strict  # whether a plugin that misbehaves ends the start (--strict-plugins)
        )
        self._loaded: dict[Entry, Any] = {}
        self._failures: dict[Entry, Entry] = {}  # each with what failed in it

    @classmethod
    def discover(
        cls,
        selection: Selection | None = None,
        *,
        strict: bool = False,
        check: bool = True,
        distributions: Iterable[importlib.metadata.Distribution] | None = None,
        core_version: str = __version__,
    ) -> Catalog:
        """Read the installed plugins' metadata. `selection` is read from the environment where not given.

        Raises PluginError where the selection names an unknown distribution, and, unless `check` is off
        (for commands that only list), as `check` does, and where it is strict for metadata that cannot be read.
        """
        found = importlib.metadata.distributions() if distributions is None else distributions
        chosen = Selection.read() if selection is None else selection
        catalog = cls(
            read_entries(found, chosen, core_version, strict=strict and check),
            chosen,
            strict=strict,
        )
        if check:
            catalog.check()
        return catalog

    def check(self) -> None:
        """Raise PluginError for a name claimed twice, and for what the user named or locked and cannot have.

        Of the rest, the log has what does not fit, which under --strict-plugins raises too.
        """
        for entry in self._entries:
            if entry.status is Status.FAILED:  # before anything is loaded, that is the only failure
                raise PluginError(entry.reason)
        unfit = {
            (e.distribution, e.reason): e for e in self._entries if e.status is Status.INCOMPATIBLE
        }
        for entry in unfit.values():
            if self.is_strict:
                raise blaming(entry, f" is incompatible: {entry.reason}")
            _of_metadata.warning(
                "plugins of %s %s are left out: %s", entry.distribution, entry.version, entry.reason
            )
        parted = (
            self._selection.excluded
        )  # what a user takes from a distribution that he names is not missed
        usable = {
            scope
            for each in self._entries
            for scope in each.scopes
            if each.status is Status.OK or not parted.isdisjoint(each.scopes[1:])
        }
        for name in sorted((self._selection.only or frozenset()) - usable):
            reasons = [
                f"{e.kind} {e.name} is {e.status}: {e.reason}"
                for e in self._entries
                if name in e.scopes
            ]
            raise PluginError(
                f"{VARIABLE} names {name}, and nothing of it can be used; {'; '.join(reasons)}"
            )
        self._pins()

    def all(self) -> tuple[Entry, ...]:
        """Return every entry, the unusable ones included, with what is known of failures."""
        return tuple(self._failures.get(entry, entry) for entry in self._entries)

    def entries(self, kind: str) -> tuple[Entry, ...]:
        """Return the usable entries of a kind, without importing any."""
        return tuple(
            entry for entry in self.all() if entry.kind == kind and entry.status is Status.OK
        )

    def names(self, kind: str) -> tuple[str, ...]:
        """Return the names that a user may type for a kind, the built-in ones included, sorted."""
        built_in = (kind_of(kind) or UNUSED).built_in
        return tuple(sorted({*built_in, *(entry.name for entry in self.entries(kind))}))

    def is_installed(self, kind: str, name: str) -> bool:
        """Say whether there is an entry of that name, usable or not; `get` says why not."""
        return any((entry.kind, entry.name) == (kind, name) for entry in self._entries)

    def get(self, kind: str, name: str) -> Entry:
        """Return the usable entry of that name.

        Raises PluginError, which tells why an installed one is not usable, or the nearest names.
        """
        for entry in self.entries(kind):
            if entry.name == name:
                return entry
        for entry in self._entries:
            if (entry.kind, entry.name) == (kind, name):
                failed = self._failed(entry) if entry in self._failures else None
                raise failed or PluginError(f"{entry} is {entry.status}: {entry.reason}")
        names = self.names(kind)
        installed = "installed: " + ", ".join(names) if names else "none is installed"
        advice = suggest(name, names) or f"; pip install the distribution that brings {name}"
        raise PluginError(f"no {kind} named {name!r}; {installed}{advice}")

    def load(self, entry: Entry, expected: type[T], *, required: bool = False) -> T | None:
        """Import an entry's descriptor, which must be an `expected` (`object`: may be anything).

        A failure is logged with its traceback, shown by `all`, and answered with None; it raises PluginError where
        the user named the entry (`required`) or its distribution, where that is locked, and under --strict-plugins.
        Plugins are imported here alone. Where a lock is not met, a TokenSpeedError is raised before any is; only the
        plugin that reads locks is imported without that check, since it makes it.
        """
        if entry.distribution not in {reader.distribution for reader in self.entries("locks")}:
            self._pins()
        if entry not in self._loaded and entry not in self._failures:
            try:
                self._loaded[entry] = _import(entry, expected)
            except (
                Exception,
                SystemExit,
            ) as error:  # plugin code may raise anything; one must not take all down
                self.reject(entry, describe_error(error), traceback.format_exc())
                if required:
                    raise self._failed(entry) from error
        if entry in self._failures and (required or self.is_required(entry)):
            raise self._failed(entry)
        return self._loaded.get(entry)

    def need(self, entry: Entry, expected: type[T]) -> T:
        """Import the descriptor of an entry that the user named. Raises PluginError where `load` has a failure."""
        descriptor = self.load(entry, expected, required=True)
        assert descriptor is not None, "a required entry is loaded or raises"
        return descriptor

    def reject(self, entry: Entry, reason: str, trace: str = "") -> None:
        """Note that what an entry loaded is of no use. Raises PluginError where `load` would for a failure."""
        self._loaded.pop(entry, None)
        reason = " ".join(reason.split())
        self._failures[entry] = replace(entry, status=Status.FAILED, reason=reason, traceback=trace)
        if entry.kind != "commands":  # whoever types one reads why it is not to be had
            logger.warning(
                "plugin %s is left out: %s",
                printable(str(entry)),
                printable(trace.rstrip() or reason),
            )
        if self.is_required(entry):
            raise self._failed(entry)

    def is_required(self, entry: Entry) -> bool:
        """Say whether an entry must not fail: none may, or the user named it or locked its distribution."""
        return self.is_strict or not {*(self._selection.only or ()), *self._pins()}.isdisjoint(
            entry.scopes
        )

    def digest(self) -> str:
        """Return a short hash of what resolved, by which processes agree that they see the same plugins.

        It covers versions and, with a lock, the content of their files.
        """
        pins = self._pins()
        lines = sorted(
            f"{e.kind} {e.name} {e.value} {e.distribution} {e.version} {pins.get(e.distribution)}"
            for e in self._entries
            if e.status is Status.OK
        )
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

    def verify(self, digest: str) -> None:
        """Raise PluginError where another process resolved other plugins than this one."""
        if digest != self.digest():
            raise PluginError(
                f"this process resolved other plugins than the launcher ({self.digest()}, not {digest}); "
                "run both in the same environment; `tokenspeed plugins list` shows what each sees"
            )

    def _pins(self) -> Mapping[str, str]:
        """Return the content's hash of each distribution that is locked, none without a lock.

        Raises PluginError where no default distribution reads locks, and what the reader does for one not met.
        """
        path = self._selection.lock
        if path is None or self._pinned is not None:
            return self._pinned or {}
        readers = self.entries("locks")
        if not readers:
            raise PluginError(
                f"plugins lock {path}: what reads it is missing or left out; {VARIABLE} shows "
                "whether, `pip install tokenspeed-plugin-tools` brings it"
            )
        self._pinned = dict(_import(readers[0], FunctionType)(path, self._entries))
        return self._pinned

    def _failed(self, entry: Entry) -> PluginError:
        return blaming(entry, f" failed to load: {self._failures[entry].reason}")


def make(
    entry: Entry,
    factory: str,
    call: Any,
    expected: type[T],
    passes: tuple[type[BaseException], ...] = (),
) -> T:
    """Return what `call` makes with the `factory` that an entry names, an `expected`.

    Raises PluginError, in one line, for whatever the call raises, but for what `passes`.
    """
    try:
        made = call()
    except passes:
        raise
    except (
        Exception,
        SystemExit,
    ) as error:  # plugin code may raise anything, and the user is told in one line
        raise blaming(entry, f": {factory} fails: {describe_error(error)}") from error
    if not isinstance(made, expected):
        raise blaming(
            entry,
            f": {factory} makes a {type(made).__name__}, which lacks what a {expected.__name__} has",
        )
    return made


def blaming(entry: Entry, what: str) -> PluginError:
    """Return what says whose fault it is, and what mends it or goes on without it."""
    from tokenspeed_core.config.schema import Config, flag, metadata

    flags = {metadata(name)["kind"]: flag(name) for name in Config.model_fields}
    selection = Selection.read()  # as whoever reads the line has it set
    out = selection.without(entry.scopes[2] if selection.only else entry.distribution)
    mend = f"`pip uninstall {entry.distribution}` or {out} goes without it"
    if entry.distribution in DEFAULTS:  # without which little is left
        mend = f"`pip install --force-reinstall --no-deps {entry.distribution}=={entry.version}` mends a damaged one"
    elif entry.status is Status.OK and (named_by := flags.get(entry.kind)):
        # To go without its distribution would make the flag name what is not there; auto takes some unasked.
        is_taken_unasked = entry.kind.startswith((KERNELS_PREFIX, "load_formats"))
        mend = (
            f"where {named_by} names it, name another or leave that out"
            + f", else {mend}" * is_taken_unasked
        )
    elif entry.status is Status.OK and entry.kind == "commands":
        mend += "; TOKENSPEED_LOG_LEVEL=debug shows its traceback"
    return PluginError(f"{entry}{what}; {mend}")


def _import(entry: Entry, expected: type[Any]) -> Any:
    if (intruder := entry.intruder()) is not None:
        module, home = entry.value.partition(":")[0], entry.editable or entry.root
        raise ImportError(
            f"{module} would come from {intruder}, and {entry.distribution} is in {home}; rename the "
            "former, or take its folder off sys.path"
        )
    value = load_target(entry.value)
    if value is None or not isinstance(
        value, expected
    ):  # None would be taken for a failure that was told
        raise TypeError(f"{entry.value} is a {type(value).__name__}, not a {expected.__name__}")
    return value


def _mark_conflicts(entries: Sequence[Entry], selection: Selection) -> list[Entry]:
    """Mark the entries whose name two distributions claim as failed."""
    claims: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        kind = kind_of(entry.kind)
        if entry.status is Status.OK and kind is not None and kind.is_named:
            claims.setdefault((entry.kind, entry.name), []).append(entry)
    clashes = {
        each: _clash(rivals, selection)
        for rivals in claims.values()
        if len(rivals) > 1
        for each in rivals
    }
    return [
        replace(each, status=Status.FAILED, reason=clashes[each]) if each in clashes else each
        for each in entries
    ]


def _clash(rivals: Sequence[Entry], selection: Selection) -> str:
    """Say who claims a name, and what leaves out all but one."""
    claims = " and ".join(f"{entry.distribution} {entry.version}" for entry in rivals)
    stays = min(rivals, key=lambda entry: entry.distribution not in DEFAULTS)
    out = [entry for entry in rivals if entry is not stays]
    names, setting = (
        [entry.distribution for entry in out],
        selection.without(*(entry.scopes[2] for entry in out)),
    )
    mend = (
        f"`pip uninstall {' '.join(names)}` or {setting} leaves out that of {' and '.join(names)}"
    )
    return f"{stays.kind} {stays.name} is claimed by {claims}; {mend}"
