"""Search for markers in text that arrives in deltas."""

from __future__ import annotations

import re


class Markers:
    """The markers of a format. No marker may be a prefix of another."""

    def __init__(self, *markers: str) -> None:
        self._pattern = re.compile(f"({'|'.join(map(re.escape, markers))})")
        self._starts = re.compile(f"[{re.escape(''.join({each[0] for each in markers}))}]")
        self._beginnings = frozenset(
            each[:size] for each in markers for size in range(1, len(each))
        )
        self._longest = max(map(len, markers))

    def may_be_in(self, text: str) -> bool:
        """Return whether a text has a character that begins a marker."""
        return self._starts.search(text) is not None

    def split(self, text: str) -> tuple[list[str], str]:
        """Return the pieces of a text, and its end if a marker may begin there.

        Pieces at odd positions are markers, the others are the possibly empty text between them.
        """
        pieces = self._pattern.split(text)
        last = pieces[-1]
        for start in self._starts.finditer(last, max(0, len(last) - self._longest + 1)):
            if last[start.start() :] in self._beginnings:
                pieces[-1] = last[: start.start()]
                return pieces, last[start.start() :]
        return pieces, ""
