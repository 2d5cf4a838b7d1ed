"""Marks in a text that comes in pieces: what must wait, since it may turn out to be part of one."""

from __future__ import annotations


def settled(text: str, mark: str) -> int:
    """Return how many characters of a text without `mark` cannot be part of one that is still to come.

    The line ends before a mark belong to it.
    """
    begun = next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:size])), 0)
    return len(text[: len(text) - begun].rstrip("\n"))
