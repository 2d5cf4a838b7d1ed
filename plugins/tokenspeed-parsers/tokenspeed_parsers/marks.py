"""Search for markers in text that arrives in deltas."""

from __future__ import annotations


def settled(text: str, mark: str) -> int:
    """Return how many leading characters cannot belong to a marker that may still follow.

    Newlines before a marker belong to it.
    """
    at = text.find(mark[0], max(0, len(text) - len(mark) + 1))
    while at >= 0 and not mark.startswith(text[at:]):
        at = text.find(mark[0], at + 1)
    return len((text if at < 0 else text[:at]).rstrip("\n"))
