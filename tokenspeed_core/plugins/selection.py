"""The user's selection of plugins, from TOKENSPEED_PLUGINS and the plugin flags."""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from tokenspeed_core.errors import PluginError, suggest

VARIABLE = "TOKENSPEED_PLUGINS"
_FALSE = ("", "0", "false", "f", "no", "n", "off")


def normalize(name: str) -> str:
    """Return a distribution's name in the normalized form of the package index."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _default_distributions() -> frozenset[str]:
    """Return tokenspeed-core and the distributions of its extra `default`, from its metadata."""
    try:
        lines = importlib.metadata.requires("tokenspeed-core") or []
    except importlib.metadata.PackageNotFoundError:
        lines = []
    named = (re.match(r"[\w.-]+", line) for line in lines if re.search("extra == .default.", line))
    return frozenset({"tokenspeed-core", *(normalize(each[0]) for each in named if each)})


DEFAULTS = _default_distributions()
"""The default distributions: they stay enabled without plugins, and their names are exact."""


def _scope(word: str) -> str:
    """Return DISTRIBUTION[:KIND[:NAME]] with the distribution's name normalized."""
    name, colon, rest = word.partition(":")
    return normalize(name) + colon + rest


@dataclass(frozen=True, slots=True)
class Selection:
    """The user's choice of plugins, as scopes: DISTRIBUTION, DISTRIBUTION:KIND or DISTRIBUTION:KIND:NAME.

    `only` is None if all plugins are wanted. Default distributions are wanted unless `excluded` names
    them. `because` is the flag or variable that chose. `lock` is the path of a lock file.
    """

    only: frozenset[str] | None = None
    excluded: frozenset[str] = frozenset()
    because: str = ""
    lock: str | None = None

    @classmethod
    def read(
        cls,
        environ: Mapping[str, str] | None = None,
        *,
        no_plugins: bool = False,
        lock: str | None = None,
    ) -> Selection:
        """Read the selection from arguments and the environment.

        `TOKENSPEED_PLUGINS` is a list of scopes: `name` selects, `-name` excludes, and an empty value
        selects none. `TOKENSPEED_NO_PLUGINS` and `TOKENSPEED_PLUGINS_LOCK` are defaults of the arguments.
        """
        environ = os.environ if environ is None else environ
        text = environ.get(VARIABLE)
        words = text.replace(",", " ").split() if text is not None else []
        excluded = frozenset(_scope(word[1:]) for word in words if word.startswith("-"))
        named = frozenset(_scope(word) for word in words if not word.startswith("-"))
        lock = lock or environ.get(f"{VARIABLE}_LOCK") or None
        if no_plugins:
            return cls(frozenset(), excluded, "--no-plugins", lock)
        switch = environ.get("TOKENSPEED_NO_PLUGINS", "")
        if switch.lower() not in _FALSE:
            return cls(frozenset(), excluded, f"TOKENSPEED_NO_PLUGINS={switch}", lock)
        only = None if text is None or (excluded and not named) else named
        return cls(only, excluded, f"{VARIABLE}={text}", lock)

    def refusal(self, scopes: Sequence[str]) -> str:
        """Return why an entry with these scopes is disabled, "" if it is not."""
        if excluded := self.excluded.intersection(scopes):
            return f"excluded by {VARIABLE}=-{min(excluded)}"
        if self.only is None or scopes[0] in DEFAULTS or not self.only.isdisjoint(scopes):
            return ""
        return f"not selected by {self.because}"

    def check(self, installed: Collection[str]) -> None:
        """Raise PluginError for a scope that is not installed, or both selected and excluded."""
        only = self.only or frozenset()
        for name in sorted(only & self.excluded):
            raise PluginError(
                f"{self.because} both selects and excludes {name}; remove one of them"
            )
        for name in sorted(only | self.excluded):
            if name not in installed:
                names = ", ".join(sorted(each for each in installed if ":" not in each))
                hint = suggest(name, installed) or f"; installed: {names}"
                raise PluginError(f"{VARIABLE} names {name}, which provides no plugin{hint}")
