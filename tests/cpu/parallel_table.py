"""The table of docs/parallelism.md: what the tests compare for each family and layout."""

from __future__ import annotations

from pathlib import Path

from tiny_families import FAMILIES

PAGE = Path(__file__).parents[2] / "docs" / "parallelism.md"


def documented(compared: str) -> list[tuple[str, str]]:
    """Return the families and layouts, such as "tp4+ep2", of the cells with this word."""
    rows = [line.strip("|").split("|") for line in PAGE.read_text().splitlines() if "|" in line]
    tables = iter(rows)
    header = next(row for row in tables if row[0].strip() == "family")
    layouts = [cell.strip().lower().replace(" ", "") for cell in header[1:]]
    return [
        (row[0].strip(), layout)
        for row in tables
        if row[0].strip() in FAMILIES
        for layout, cell in zip(layouts, row[1:], strict=True)
        if compared in cell
    ]
