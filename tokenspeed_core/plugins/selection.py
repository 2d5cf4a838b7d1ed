"""Which plugins the user wants."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from tokenspeed_core.errors import PluginError, suggest

VARIABLE = "TOKENSPEED_PLUGINS"
# The default distributions: tokenspeed-core and those of tokenspeed-core[default], which stay without plugins. By exact
# name, since strangers may publish under the prefix too.
DEFAULTS = frozenset(
    f"tokenspeed-{part}"
    for part in (
        "core",
        "kernels",
        "models",
        "demo",
        "bench",
        "chat",
        "parsers",
        "plugin-tools",
        "server",
    )
)


def normalise(name: str) -> str:
    """Return a distribution's name as the package index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _scope(word: str) -> str:
    """Return DISTRIBUTION[:KIND[:NAME]] with the first normalised."""
    name, colon, rest = word.partition(":")
    return normalise(name) + colon + rest


def _covering(scopes: Collection[str], name: str) -> str:
    """Return the widest of these scopes that a scope is or is a part of, "" where there is none."""
    return min(
        (scope for scope in scopes if f"{name}:".startswith(f"{scope}:")), key=len, default=""
    )


@dataclass(frozen=True, slots=True)
class Selection:
    """Distributions by exact normalised name, or of one a kind of plugin or a single one, as `Entry.scopes` has them.

    The default distributions stay unless `excluded` names them.
    """

    only: frozenset[str] | None = None  # None: all
    excluded: frozenset[str] = frozenset()
    because: str = ""
    lock: str | None = None  # the file that pins them

    @classmethod
    def read(
        cls,
        environ: Mapping[str, str] | None = None,
        *,
        no_plugins: bool = False,
        lock: str | None = None,
    ) -> Selection:
        """Read `TOKENSPEED_PLUGINS`: scopes (only these), `-scope` (all but these), empty (none).

        For any program of this environment `TOKENSPEED_NO_PLUGINS`, unless it is a no, says `no_plugins` where that
        does not, and `TOKENSPEED_PLUGINS_LOCK` names the lock where `lock` does not.
        """
        environ = os.environ if environ is None else environ
        text, lock = environ.get(VARIABLE), lock or environ.get(f"{VARIABLE}_LOCK") or None
        words = text.replace(",", " ").split() if text is not None else []
        excluded = frozenset(_scope(word[1:]) for word in words if word.startswith("-"))
        named = frozenset(_scope(word) for word in words if not word.startswith("-"))
        word = environ.get("TOKENSPEED_NO_PLUGINS", "")
        if no_plugins or word.lower() not in ("", "0", "false", "f", "no", "n", "off"):
            return cls(
                frozenset(),
                excluded,
                "--no-plugins" if no_plugins else f"TOKENSPEED_NO_PLUGINS={word}",
                lock,
            )
        only = None if text is None or (excluded and not named) else named
        return cls(only, excluded, f"{VARIABLE}={text}", lock)

    def refusal(self, scopes: Sequence[str]) -> str:
        """Return why an entry, of these scopes, is left out, "" when it is not."""
        if out := self.excluded.intersection(scopes):
            return f"left out by {VARIABLE}=-{min(out)}"
        if self.only is None or scopes[0] in DEFAULTS or not self.only.isdisjoint(scopes):
            return ""
        return f"left out by {self.because}"

    def without(self, *scopes: str) -> str:
        """Return what to set the variable to so that these are left out too, and all else stays as it is."""
        named = [name for name in sorted(self.only or ()) if not _covering(scopes, name)]
        words = ",".join([*named, *(f"-{scope}" for scope in sorted(self.excluded.union(scopes)))])
        # Where no name is left, what is taken away would alone bring all the others back.
        return f"{'TOKENSPEED_NO_PLUGINS=1 ' * (self.only is not None and not named)}{VARIABLE}={words}"

    def check(self, installed: Collection[str]) -> None:
        """Refuse names that no installed plugin has, of whose scopes these are all, and those both wanted and not.

        Raises PluginError.
        """
        for name in sorted(self.only or ()):
            if out := _covering(self.excluded, name):
                raise PluginError(
                    f"{self.because} wants {name} and takes it away with -{out}; leave one of them out"
                )
        for name in sorted((self.only or frozenset()) | self.excluded):
            if name not in installed:
                there = ", ".join(sorted(each for each in installed if ":" not in each))
                hint = suggest(name, installed) or f"; installed: {there}"
                raise PluginError(f"{VARIABLE} names {name}, which provides no plugin here{hint}")
