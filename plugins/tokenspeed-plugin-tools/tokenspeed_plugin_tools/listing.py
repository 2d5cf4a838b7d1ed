"""`tokenspeed plugins list`: what is installed, from metadata alone."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches
from itertools import groupby
from typing import Annotated

import typer

from tokenspeed_core.commands import Catalog, Entry, Selection, Status
from tokenspeed_plugin_tools.errors import ToolsError
from tokenspeed_plugin_tools.installed import with_unreadable
from tokenspeed_plugin_tools.layout import GAP, aligned, folded, printable
from tokenspeed_plugin_tools.origins import record_of, unread_range, where_from

HEADER = ("NAME", "VERSION", "KIND", "API", "PROVIDES", "STATUS", "ORIGIN")


def list_plugins(
    as_json: Annotated[bool, typer.Option("--json", help="for machines")] = False,
    kind: Annotated[
        str | None, typer.Option("--kind", help="of this kind only, such as models or kernels")
    ] = None,
    load: Annotated[
        bool, typer.Option("--load", help="import each, to find those that fail")
    ] = False,
    no_plugins: Annotated[
        bool, typer.Option("--no-plugins", help="as serve with this flag sees it")
    ] = False,
    ops: Annotated[
        bool, typer.Option("--ops", help="the ops instead, with who brings and who computes each")
    ] = False,
) -> int:
    """Print a line per distribution, kind and status, then the reasons of what is not usable."""
    if ops and (load or kind is not None):
        raise ToolsError(f"--ops lists no plugins; leave out {'--load' if load else '--kind'}")
    installed = Catalog.discover(Selection.read(no_plugins=no_plugins), check=False).all()
    entries = _of_kind(with_unreadable(installed), kind)
    if ops:
        _list_ops(entries, as_json)
        return 0
    if load:
        entries = _loaded(entries)
    if as_json:
        print(json.dumps([record_of(entry) for entry in entries], indent=2))
    else:
        print(
            table(
                entries, shutil.get_terminal_size((80, 24)).columns if sys.stdout.isatty() else None
            )
        )
    return 0


def _loaded(entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
    """Mark those entries as failed whose import fails, in a process of its own."""
    from tokenspeed_plugin_tools.lock import enforce_environment
    from tokenspeed_plugin_tools.probe import probe

    enforce_environment()
    errors = {entry: told.error for entry, told in probe(entries).items() if told.error}
    return tuple(
        replace(entry, status=Status.FAILED, reason=errors[entry]) if entry in errors else entry
        for entry in entries
    )


def _list_ops(entries: tuple[Entry, ...], as_json: bool) -> None:
    from tokenspeed_plugin_tools.lock import enforce_environment
    from tokenspeed_plugin_tools.ops import print_ops

    enforce_environment()
    print_ops(entries, as_json=as_json)


def _of_kind(entries: tuple[Entry, ...], kind: str | None) -> tuple[Entry, ...]:
    """Keep the entries of a kind, or of all kinds below it: "kernels" takes "kernels.moe". Raises ToolsError."""
    if kind is None:
        return entries
    wanted = kind.removeprefix("tokenspeed.")
    found = tuple(
        entry for entry in entries if entry.kind == wanted or entry.kind.startswith(f"{wanted}.")
    )
    if not found:
        kinds = sorted({entry.kind for entry in entries})
        near = [each for each in kinds if each.endswith(f".{wanted}")] or get_close_matches(
            wanted, kinds, n=1
        )
        meant = f"did you mean {near[0]}? " if near else ""
        raise ToolsError(
            f"--kind {kind}: nothing of this kind is installed; {meant}there is "
            f"{', '.join(kinds) or 'nothing'}"
        )
    return found


def table(entries: Sequence[Entry], width: int | None = None) -> str:
    """Lay the entries out, a line each; where that is wider than `width` columns, in a block for each distribution.

    Nothing is cut or left out; None is for what is no terminal, and has any width.
    """
    if not entries:
        return (
            "no plugins are installed; pip install tokenspeed-core[default] brings the usual ones"
        )
    groups = [
        list(group)
        for _, group in groupby(
            entries, key=lambda e: (e.distribution, e.version, e.kind, e.status, e.api)
        )
    ]
    lines = aligned([HEADER, *(_row(group) for group in groups)])
    if width is not None and max(map(len, lines)) > width:
        lines = list(_blocks(groups, width))
    reasons = list(_reasons(groups))
    return "\n".join([*lines, *([""] if reasons else []), *map(printable, reasons)])


def _reasons(groups: Iterable[list[Entry]]) -> Iterator[str]:
    """Yield why entries are not used, or not for long: once for a distribution where it is the same for all of it."""
    for (name, _), parts in groupby(
        groups, key=lambda group: (group[0].distribution, group[0].version)
    ):
        told = [
            (
                f"{name} {group[0].kind} ({', '.join(each.name for each in group)})",
                group[0].reason or unread_range(group[0]),
            )
            for group in parts
        ]
        if len(told) > 1 and len({said for _, said in told}) == 1:
            told = [(name, told[0][1])]
        yield from dict.fromkeys(f"{what}: {said}" for what, said in told if said)


def _row(group: list[Entry]) -> tuple[str, ...]:
    first = group[0]
    api = "-" if first.api is None else str(first.api)
    names = ", ".join(entry.name for entry in group)
    cells = (
        first.distribution,
        first.version,
        first.kind,
        api,
        names,
        str(first.status),
        where_from(first),
    )
    return tuple(map(printable, cells))


def _blocks(groups: Iterable[list[Entry]], width: int) -> Iterator[str]:
    """Yield a distribution's name, version and origin, and below a line for each of its kinds, folded to `width`."""
    rows = [_row(group) for group in groups]
    starts = aligned(
        [(row[2], row[3] if row[3] == "-" else f"api {row[3]}", row[5]) for row in rows]
    )
    indent = max(map(len, starts)) + 2 * len(GAP)
    for head, group in groupby(
        zip(rows, starts, strict=True), key=lambda pair: (*pair[0][:2], pair[0][6])
    ):
        yield from folded(" ".join(head[:2]) + GAP + head[2], 2 * len(GAP), width)
        for row, start in group:
            yield from folded(
                f"{GAP}{start}".ljust(indent) + row[4], min(indent, width // 2), width
            )
