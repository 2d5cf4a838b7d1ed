"""Text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence


def printable(text: str) -> str:
    """Escape control characters: plugins choose their names and error messages."""
    return "".join(
        each if each.isprintable() or each == "\n" else each.encode("unicode_escape").decode()
        for each in text
    )


def columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return one line per row, with aligned cells."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
