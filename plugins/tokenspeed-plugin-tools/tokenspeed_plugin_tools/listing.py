"""`tokenspeed plugins list`: what is installed, from metadata alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Annotated

import typer

from tokenspeed_core.commands import Catalog, Entry, Selection, Status
from tokenspeed_plugin_tools.errors import ToolsError
from tokenspeed_plugin_tools.origins import record_of, where_from

HEADER = ("NAME", "VERSION", "KIND", "API", "PROVIDES", "STATUS", "ORIGIN")
GAP = "  "
NARROWEST = ((6, 12), (4, 10), (6, 0), (0, 18), (2, 12))  # what shrinks to fit a terminal: column, how far


def list_plugins(
    as_json: Annotated[bool, typer.Option("--json", help="for machines")] = False,
    kind: Annotated[str | None, typer.Option("--kind", help="of this kind only, such as models or kernels")] = None,
    load: Annotated[bool, typer.Option("--load", help="import each, to find those that fail")] = False,
    no_plugins: Annotated[bool, typer.Option("--no-plugins", help="as serve with this flag sees it")] = False,
) -> int:
    """Print a line per distribution, kind and status, then the reasons of what is not usable."""
    entries = _of_kind(Catalog.discover(Selection.read(no_plugins=no_plugins), check=False).all(), kind)
    if load:
        entries = _loaded(entries)
    if as_json:
        print(json.dumps([record_of(entry) for entry in entries], indent=2))
    else:
        print(table(entries, shutil.get_terminal_size((80, 24)).columns))
    return 0


def _loaded(entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
    """Mark those entries as failed whose import fails, in a process of its own."""
    from tokenspeed_plugin_tools.lock import enforce_environment
    from tokenspeed_plugin_tools.probe import probe

    enforce_environment()
    errors = {entry: told.error for entry, told in probe(entries).items() if told.error}
    return tuple(
        replace(entry, status=Status.FAILED, reason=errors[entry]) if entry in errors else entry for entry in entries
    )


def _of_kind(entries: tuple[Entry, ...], kind: str | None) -> tuple[Entry, ...]:
    """Keep the entries of a kind, or of all kinds below it: "kernels" takes "kernels.moe". Raises ToolsError."""
    if kind is None:
        return entries
    wanted = kind.removeprefix("tokenspeed.")
    found = tuple(entry for entry in entries if entry.kind == wanted or entry.kind.startswith(f"{wanted}."))
    if not found:
        kinds = ", ".join(sorted({entry.kind for entry in entries})) or "nothing"
        raise ToolsError(f"--kind {kind}: nothing of this kind is installed; there is {kinds}")
    return found


def table(entries: Sequence[Entry], width: int) -> str:
    """Lay the entries out in at most `width` columns; where that is too narrow, ORIGIN is left to --json."""
    if not entries:
        return "no plugins are installed; pip install tokenspeed-core[default] brings the usual ones"
    groups = [
        list(group) for _, group in groupby(entries, key=lambda e: (e.distribution, e.version, e.kind, e.status, e.api))
    ]
    rows = [HEADER, *(_row(group) for group in groups)]
    widths = _fit([max(len(row[column]) for row in rows) for column in range(len(HEADER))], width)
    lines = [GAP.join(_cut(cell, w).ljust(w) for cell, w in zip(row, widths, strict=False)).rstrip() for row in rows]
    reasons = dict.fromkeys(
        f"{group[0].distribution} {group[0].kind} ({', '.join(e.name for e in group)}): {group[0].reason}"
        for group in groups
        if group[0].status is not Status.OK
    )
    return "\n".join([*lines, *([""] if reasons else []), *reasons])


def _row(group: list[Entry]) -> tuple[str, ...]:
    first = group[0]
    api = "-" if first.api is None else str(first.api)
    names = ", ".join(entry.name for entry in group)
    return (first.distribution, first.version, first.kind, api, names, str(first.status), where_from(first))


def _fit(widths: list[int], available: int) -> list[int]:
    """Shrink or drop columns until a line fits, or nothing more may go."""
    for column, least in NARROWEST:
        surplus = sum(widths) + len(GAP) * (len(widths) - 1) - available
        if surplus <= 0:
            break
        if least == 0:
            widths = widths[:column]
        elif widths[column] > least:
            widths[column] = max(least, widths[column] - surplus)
    return widths


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."
