"""The catalog of installed plugins. It reads metadata, and imports a plugin only when it is requested."""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from tokenspeed_core import __version__
from tokenspeed_core.errors import PluginError, describe_error, printable, suggest
from tokenspeed_core.plugins.entry import Entry, Preflight, Status
from tokenspeed_core.plugins.kinds import kind_of
from tokenspeed_core.plugins.metadata import read_entries
from tokenspeed_core.plugins.selection import DEFAULTS, VARIABLE, Selection
from tokenspeed_core.targets import load_target

T = TypeVar("T")
logger = logging.getLogger("tokenspeed.plugins")
# Records about metadata. Only the launcher of a server logs them.
_metadata_logger = logging.getLogger("tokenspeed.plugins.metadata")


class Catalog:
    """The installed entries, ordered by distribution name, then kind, then entry name."""

    def __init__(
        self, entries: Sequence[Entry], selection: Selection | None = None, *, strict: bool = False
    ) -> None:
        """With `strict`, every plugin that fails raises PluginError."""
        self._selection = selection or Selection()
        self._entries = tuple(_mark_conflicts(entries))
        self.is_strict = strict
        self._loaded: dict[Entry, Any] = {}
        self._failures: dict[Entry, Entry] = {}
        self._digests: Mapping[str, str] | None = None

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
        """Read the metadata of installed plugins. By default, the environment selects them.

        With `check`, raises PluginError as `check` does. Always raises PluginError if the selection names
        an unknown distribution.
        """
        found = importlib.metadata.distributions() if distributions is None else distributions
        chosen = Selection.read() if selection is None else selection
        entries = read_entries(found, chosen, core_version, strict=strict and check)
        catalog = cls(entries, chosen, strict=strict)
        if check:
            catalog.check()
        return catalog

    def check(self) -> None:
        """Check the plugins before a start, and log those that are incompatible.

        Raises PluginError for a name that two distributions claim, for a selected plugin that cannot be
        used, for a lock that is not met, and in strict mode for any incompatible plugin.
        """
        for entry in self._entries:
            if entry.status is Status.FAILED:
                raise PluginError(entry.reason)
        incompatible = {
            (entry.distribution, entry.reason): entry
            for entry in self._entries
            if entry.status is Status.INCOMPATIBLE
        }
        for entry in incompatible.values():
            if self.is_strict:
                raise plugin_error(entry, f"is incompatible: {entry.reason}")
            _metadata_logger.warning(
                "%s %s is incompatible: %s", entry.distribution, entry.version, entry.reason
            )
        self._check_selected()
        self._run_preflight()

    def all(self) -> tuple[Entry, ...]:
        """Return every entry, including those that cannot be used or failed."""
        return tuple(self._failures.get(entry, entry) for entry in self._entries)

    def entries(self, kind: str) -> tuple[Entry, ...]:
        """Return the usable entries of a kind, without importing any."""
        return tuple(
            entry for entry in self.all() if entry.kind == kind and entry.status is Status.OK
        )

    def names(self, kind: str) -> tuple[str, ...]:
        """Return the names that a user may choose for a kind, including built-in ones, sorted."""
        known = kind_of(kind)
        built_in = known.built_in if known is not None else ()
        return tuple(sorted({*built_in, *(entry.name for entry in self.entries(kind))}))

    def is_installed(self, kind: str, name: str) -> bool:
        """Return whether an entry of that name exists, usable or not."""
        return any((entry.kind, entry.name) == (kind, name) for entry in self._entries)

    def get(self, kind: str, name: str, *, flag: str = "") -> Entry:
        """Return the usable entry of that name, which the user gave with `flag`.

        Raises PluginError, with the reason if the entry exists but cannot be used.
        """
        for entry in self.entries(kind):
            if entry.name == name:
                return entry
        for entry in self._entries:
            if (entry.kind, entry.name) == (kind, name):
                if entry in self._failures:
                    raise self._load_error(entry)
                raise PluginError(f"{entry} is {entry.status}: {entry.reason}")
        names = self.names(kind)
        installed = f"installed: {', '.join(names)}" if names else "none is installed"
        hint = suggest(name, names) or f"; install the distribution that provides {name}"
        where = f"{flag} {name}: " if flag else ""
        raise PluginError(f"{where}no {kind} named {name!r}; {installed}{hint}")

    def load(self, entry: Entry, expected: type[T], *, required: bool = False) -> T | None:
        """Import an entry's value, which must be an instance of `expected`.

        A failure is logged, recorded in `all` and returns None. It raises PluginError if the user named
        the entry (`required`), its distribution is selected or locked by name, or in strict mode. If
        there is a lock, it is checked before the first import.
        """
        if self._selection.lock is not None and not self._belongs_to_preflight(entry):
            self._run_preflight()
        if entry not in self._loaded and entry not in self._failures:
            try:
                self._loaded[entry] = _import(entry, expected)
            except (Exception, SystemExit) as error:
                self.reject(entry, describe_error(error), traceback.format_exc())
                if required:
                    raise self._load_error(entry) from error
        if entry in self._failures and (required or self.is_required(entry)):
            raise self._load_error(entry)
        return self._loaded.get(entry)

    def need(self, entry: Entry, expected: type[T]) -> T:
        """Import the value of an entry that the user named. Raises PluginError if that fails."""
        value = self.load(entry, expected, required=True)
        assert value is not None, "a required entry is loaded or raises"
        return value

    def reject(self, entry: Entry, reason: str, trace: str = "") -> None:
        """Mark an entry as failed. Raises PluginError if `load` would raise for a failure."""
        self._loaded.pop(entry, None)
        reason = " ".join(reason.split())
        self._failures[entry] = replace(entry, status=Status.FAILED, reason=reason, traceback=trace)
        # A failed command is reported to the user who runs it.
        if entry.kind != "commands":
            logger.warning(
                "%s failed to load: %s",
                printable(str(entry)),
                printable(trace.rstrip() or reason),
            )
        if self.is_required(entry):
            raise self._load_error(entry)

    def is_required(self, entry: Entry) -> bool:
        """Return whether a failure of this entry is an error: it is selected or locked by name, or the mode is strict."""
        named = {*(self._selection.only or ()), *(self._digests or ())}
        return self.is_strict or not named.isdisjoint(entry.scopes)

    def digest(self) -> str:
        """Return a short hash of the usable entries, their versions and, if locked, their files.

        Processes compare it to make sure that they use the same plugins.
        """
        contents = self._run_preflight()
        lines = sorted(
            f"{e.kind} {e.name} {e.value} {e.distribution} {e.version} {contents.get(e.distribution)}"
            for e in self._entries
            if e.status is Status.OK
        )
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

    def versions(self) -> dict[str, str]:
        """Return the versions of the core and of the distributions with usable entries."""
        usable = {e.distribution: e.version for e in self._entries if e.status is Status.OK}
        return {**usable, "tokenspeed-core": __version__}

    def verify(self, digest: str) -> None:
        """Raise PluginError if another process uses different plugins."""
        if digest != self.digest():
            raise PluginError(
                f"this process found different plugins than its parent process ({self.digest()}, not {digest}). "
                "Run both in the same environment; `tokenspeed plugins list` shows its plugins."
            )

    def _check_selected(self) -> None:
        """Raise PluginError if a selected name has no usable entry."""
        usable = {
            scope
            for entry in self._entries
            for scope in entry.scopes
            # A part of the distribution may be excluded on purpose.
            if entry.status is Status.OK
            or not self._selection.excluded.isdisjoint(entry.scopes[1:])
        }
        for name in sorted((self._selection.only or frozenset()) - usable):
            reasons = [
                f"{entry.kind} {entry.name} is {entry.status}: {entry.reason}"
                for entry in self._entries
                if name in entry.scopes
            ]
            raise PluginError(f"{VARIABLE} selects {name}, but {'; '.join(reasons)}")

    def _run_preflight(self) -> Mapping[str, str]:
        """Run the installed preflight check once, and return the digests of locked distributions.

        Raises PluginError if there is a lock and no check is installed, or as the check does.
        """
        if self._digests is not None:
            return self._digests
        lock = self._selection.lock
        checks = self.entries("preflight")
        if not checks:
            if lock is not None:
                raise PluginError(
                    f"cannot read plugin lock {lock}: tokenspeed-plugin-tools is missing or disabled. "
                    "Run `pip install tokenspeed-plugin-tools`."
                )
            self._digests = {}
            return self._digests
        result: Preflight = load_target(checks[0].value)(self._entries, lock)
        self._digests = result.digests
        for entry, reason in result.problems.items():
            self.reject(entry, reason)
        return self._digests

    def _belongs_to_preflight(self, entry: Entry) -> bool:
        return entry.distribution in {check.distribution for check in self.entries("preflight")}

    def _load_error(self, entry: Entry) -> PluginError:
        return plugin_error(entry, f"failed to load: {self._failures[entry].reason}")


def make(
    entry: Entry,
    factory: str,
    call: Any,
    expected: type[T],
    passes: tuple[type[BaseException], ...] = (),
) -> T:
    """Call an entry's `factory` through `call` and return the result, an instance of `expected`.

    Exceptions become a PluginError, except those in `passes`.
    """
    try:
        made = call()
    except passes:
        raise
    except (Exception, SystemExit) as error:
        raise plugin_error(entry, f"failed in {factory}: {describe_error(error)}") from error
    if not isinstance(made, expected):
        found = type(made).__name__
        raise plugin_error(
            entry, f"failed: {factory} returned {found}, expected {expected.__name__}"
        )
    return made


def plugin_error(entry: Entry, problem: str) -> PluginError:
    """Return an error about a plugin, with the user's options."""
    kind = kind_of(entry.kind)
    if entry.distribution in DEFAULTS:
        advice = (
            f"Reinstall it with `pip install --force-reinstall --no-deps "
            f"{entry.distribution}=={entry.version}`."
        )
    elif kind is not None and kind.selected_by:
        advice = (
            f"Choose another {kind.selected_by}, or disable the plugin with "
            f"{VARIABLE}=-{entry.distribution}."
        )
    else:
        advice = f"Fix or uninstall it, or disable it with {VARIABLE}=-{entry.distribution}."
    return PluginError(f"{entry} {problem}. {advice}")


def _import(entry: Entry, expected: type[Any]) -> Any:
    value = load_target(entry.value)
    # None would be mistaken for a failure.
    if value is None or not isinstance(value, expected):
        raise TypeError(
            f"{entry.value} is of type {type(value).__name__}, expected {expected.__name__}"
        )
    return value


def _mark_conflicts(entries: Sequence[Entry]) -> list[Entry]:
    """Mark entries as failed if another distribution claims the same name."""
    claims: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        kind = kind_of(entry.kind)
        if entry.status is Status.OK and kind is not None and kind.is_unique:
            claims.setdefault((entry.kind, entry.name), []).append(entry)
    marked = []
    for entry in entries:
        rivals = claims.get((entry.kind, entry.name), [])
        if len(rivals) > 1 and entry in rivals:
            entry = replace(entry, status=Status.FAILED, reason=_conflict(rivals))
        marked.append(entry)
    return marked


def _conflict(rivals: Sequence[Entry]) -> str:
    """Return who claims a name, and how to keep one of them."""
    owners = " and ".join(f"{entry.distribution} {entry.version}" for entry in rivals)
    kept = min(rivals, key=lambda entry: entry.distribution not in DEFAULTS)
    others = [entry for entry in rivals if entry is not kept]
    names = " ".join(entry.distribution for entry in others)
    scopes = ",".join(f"-{entry.scopes[2]}" for entry in others)
    return (
        f"{kept.kind} {kept.name} is provided by {owners}. "
        f"Run `pip uninstall {names}`, or disable it with {VARIABLE}={scopes}."
    )
