"""What is on its way out: for two minors of tokenspeed-core it still works, and whoever uses it is warned.

A row is named as docs/contract.json names what it is about: `tokenspeed_core.api.View` (its value then stands there as
`_View`), `tokenspeed_core.api.BuildContext.op(layer)`. An older contract that a kind still takes is
`kind models [api1]`, a setting `flag --seed`. docs/make_contract.py holds every row to its two versions.
"""

from __future__ import annotations

import sys
import warnings
from typing import NamedTuple


class Deprecation(NamedTuple):
    """The first minor of tokenspeed-core that warns, the first that lacks it, and what takes its place."""

    since: str
    goes: str
    replacement: str

    def __str__(self) -> str:
        return f"is deprecated since tokenspeed-core {self.since} and goes with {self.goes}; use {self.replacement}"


DEPRECATED: dict[str, Deprecation] = {}


def contract(kind: str, api: int | None) -> str:
    """Return the name of a row about the contract of a kind that has this number."""
    return f"kind {kind} [api{api}]"


def warn(old: str, user: str = "") -> None:
    """Warn that `user`, or the module that called the caller, uses what is deprecated; of all else, say nothing.

    Python shows it once a process for each line. It is not for what a step calls.
    """
    if old in DEPRECATED:
        user = user or sys._getframe(2).f_globals["__name__"]
        warnings.warn(f"{user}: {old} {DEPRECATED[old]}", FutureWarning, stacklevel=3)
