"""Which distributions' plugins the user wants."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from tokenspeed_core.errors import PluginError, meant

VARIABLE = "TOKENSPEED_PLUGINS"
OURS = frozenset(
    f"tokenspeed-{part}" for part in ("core", "kernels", "models", "demo", "bench", "chat", "parsers", "plugin-tools")
)


def normalise(name: str) -> str:
    """Return a distribution's name as the package index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


@dataclass(frozen=True, slots=True)
class Selection:
    """Distributions by exact normalised name. TokenSpeed's own stay unless `excluded` names them."""

    only: frozenset[str] | None = None  # None: all
    excluded: frozenset[str] = frozenset()
    because: str = ""
    lock: str | None = None  # the file that pins them

    @classmethod
    def read(
        cls, environ: Mapping[str, str] | None = None, *, no_plugins: bool = False, lock: str | None = None
    ) -> Selection:
        """Read `TOKENSPEED_PLUGINS`: names (only these), `-name` (all but these), empty (none).

        `TOKENSPEED_PLUGINS_LOCK` names the lock where `lock` does not, for any program of this environment.
        """
        environ = os.environ if environ is None else environ
        text, lock = environ.get(VARIABLE), lock or environ.get(f"{VARIABLE}_LOCK") or None
        words = text.replace(",", " ").split() if text is not None else []
        excluded = frozenset(normalise(word[1:]) for word in words if word.startswith("-"))
        named = frozenset(normalise(word) for word in words if not word.startswith("-"))
        if no_plugins:
            return cls(frozenset(), excluded, "--no-plugins", lock)
        only = None if text is None or (excluded and not named) else named
        return cls(only, excluded, f"{VARIABLE}={text}", lock)

    def refusal(self, distribution: str) -> str:
        """Return why a distribution (normalised name) is left out, "" when it is not."""
        if distribution in self.excluded:
            return f"left out by {VARIABLE}=-{distribution}"
        if self.only is None or distribution in OURS or distribution in self.only:
            return ""
        return f"left out by {self.because}"

    def check(self, installed: Collection[str]) -> None:
        """Refuse names that no installed plugin distribution has. Raises PluginError."""
        for name in sorted((self.only or frozenset()) | self.excluded):
            if name not in installed:
                hint = meant(name, installed) or f"; installed: {', '.join(sorted(installed))}"
                raise PluginError(f"{VARIABLE} names {name}, which provides no plugin here{hint}")
