"""One named thing that an installed distribution provides, as its metadata tells it; and its import."""

from __future__ import annotations

import importlib.util
import logging
import sys
from dataclasses import dataclass, field
from enum import StrEnum
from functools import reduce
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from tokenspeed_core.plugins.selection import VARIABLE


class Status(StrEnum):
    """Whether an entry may be used."""

    OK = "ok"
    DISABLED = "disabled"  # the user left its distribution out
    INCOMPATIBLE = "incompatible"  # another api or core version, or a kind unknown here
    FAILED = "failed"  # its import raised, or two distributions claim its name
    UNUSED = "unused"  # nothing in this core asks for its kind
    SHADOWED = "shadowed"  # another copy of the distribution comes first on sys.path


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry point of group `tokenspeed.<kind>`. `reason` is empty where the status is ok.

    `api` is None where the entry names none; `requires_core` is a version specifier, "" for any;
    `origin` is "installed", "editable PATH", or the URL or path that pip installed from; `root` is the folder that
    holds the distribution's metadata, "" where that is unknown; `traceback` is of an import that failed.
    """

    kind: str
    name: str
    value: str
    api: int | None
    distribution: str
    version: str
    origin: str
    requires_core: str
    status: Status
    reason: str
    root: str = field(default="", compare=False)  # two paths may lead to one copy
    traceback: str = field(default="", compare=False)

    def __str__(self) -> str:
        """Say what it is and whose, as errors do."""
        return f"{self.kind} {self.name} of {self.distribution} {self.version}"

    @property
    def scopes(self) -> tuple[str, str, str]:
        """What names it in a selection: its distribution, that and its kind, and these and its name."""
        kind = f"{self.distribution}:{self.kind}"
        return self.distribution, kind, f"{kind}:{self.name}"

    @property
    def editable(self) -> str:
        """The folder of an editable install, "" for any other."""
        kind, _, folder = self.origin.partition(" ")
        return folder if kind == "editable" else ""

    def source(self) -> Path | None:
        """Return the folder or file of the outermost package of the value, importing nothing; None where there is none.

        Namespace packages hold no code and are passed through, to find this distribution's part of them.
        """
        name, path = "", None
        for part in self.value.partition(":")[0].split("."):
            name = f"{name}.{part}".lstrip(".")
            spec = (
                importlib.util.find_spec(name) if path is None else PathFinder.find_spec(name, path)
            )
            if spec is None or spec.origin is not None:
                break
            path = spec.submodule_search_locations
        if spec is None or spec.origin is None:
            return None
        origin = Path(spec.origin).resolve()
        return origin if spec.submodule_search_locations is None else origin.parent

    def intruder(self) -> Path | None:
        """Return what an import would find in place of this distribution's code, None where it finds that.

        It is something of the same name that comes earlier on `sys.path`, in the working directory for one. What
        is imported already does not come into question.
        """
        home, top = self.editable or self.root, self.value.partition(":")[0].partition(".")[0]
        source = self.source() if home and top not in sys.modules else None
        return None if source is None or source.is_relative_to(Path(home).resolve()) else source


def load_target(target: str) -> Any:
    """Import "module:attribute" and return the attribute, which may have dots, or "module" and return that.

    Raises ImportError or AttributeError as the import does. Where Ctrl-C cuts it short, the log says what it was in:
    a module may raise the same on its own, and the process would end without a word.
    """
    module, _, attribute = target.partition(":")
    try:
        found = importlib.import_module(module)
    except KeyboardInterrupt:
        logging.getLogger("tokenspeed.plugins").warning(
            "interrupted while %s was imported; where nobody pressed Ctrl-C it raised KeyboardInterrupt itself, and "
            "%s=-NAME goes without its distribution, one of `tokenspeed plugins list`",
            module,
            VARIABLE,
        )
        raise
    return reduce(getattr, filter(None, attribute.split(".")), found)
