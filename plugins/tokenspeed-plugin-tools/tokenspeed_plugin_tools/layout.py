"""Columns and folded lines of text."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap

GAP = "  "


def printable(text: str) -> str:
    """Return a text that cannot steer a terminal: names and reasons are as their plugins wrote them."""
    shown = (each if each.isprintable() or each == "\n" else each.encode("unicode_escape").decode() for each in text)
    return "".join(shown)


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return a line for each row, its cells in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [GAP.join(map(str.ljust, row, widths)).rstrip() for row in rows]


def folded(text: str, indent: int, width: int) -> list[str]:
    """Break a line between words alone, so that a path or a name can be copied."""
    return wrap(text, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
