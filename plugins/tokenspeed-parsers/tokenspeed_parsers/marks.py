"""Marks in a text that comes in deltas: what must wait, since it may turn out to be part of one."""

from __future__ import annotations


def settled(text: str, mark: str) -> int:
    """Return how many characters of a text without `mark` cannot be part of one that is still to come.

    The line ends before a mark belong to it.
    """
    at = text.find(mark[0], max(0, len(text) - len(mark) + 1))
    while at >= 0 and not mark.startswith(text[at:]):
        at = text.find(mark[0], at + 1)
    return len((text if at < 0 else text[:at]).rstrip("\n"))
