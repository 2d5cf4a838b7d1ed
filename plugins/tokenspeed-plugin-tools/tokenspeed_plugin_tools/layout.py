"""Columns and folded lines of text."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Sequence
from textwrap import wrap

GAP = "  "
_LABEL = re.compile(r" *(\S+ {2,})?")  # with which a line begins


def printable(text: str) -> str:
    """Return a text that cannot steer a terminal: names and reasons are as their plugins wrote them."""
    shown = (
        each if each.isprintable() or each == "\n" else each.encode("unicode_escape").decode()
        for each in text
    )
    return "".join(shown)


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return a line for each row, its cells in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [GAP.join(map(str.ljust, row, widths)).rstrip() for row in rows]


def folded(text: str, indent: int, width: int) -> list[str]:
    """Break a line between words alone, so that a path or a name can be copied."""
    return wrap(
        text, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )


def shown(text: str) -> str:
    """Return a text as people read it: printable and, on a terminal, folded to its width below what each line labels.

    What is to be typed ("-> ...") stays in one line, as it is copied.
    """
    lines = printable(text).split("\n")
    if not sys.stdout.isatty():
        return "\n".join(lines)
    width = shutil.get_terminal_size((80, 24)).columns
    parts = (
        [line] if line.lstrip().startswith("->") else folded(line, _indent(line, width), width)
        for line in lines
    )
    return "\n".join("\n".join(part) for part in parts)


def _indent(line: str, width: int) -> int:
    label = _LABEL.match(line)
    return min(label.end() if label else 0, width // 2)
