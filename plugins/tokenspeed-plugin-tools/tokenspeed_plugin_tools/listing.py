"""`tokenspeed plugins list`: the installed plugins, from metadata."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches
from itertools import groupby
from typing import Annotated

import typer

from tokenspeed_core.commands import Catalog, Entry, Selection, Status
from tokenspeed_plugin_tools.errors import ToolsError
from tokenspeed_plugin_tools.installed import origin_column, record_of, with_unreadable
from tokenspeed_plugin_tools.text import columns, printable

HEADER = ("NAME", "VERSION", "KIND", "API", "PROVIDES", "STATUS", "ORIGIN")


def list_plugins(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    kind: Annotated[
        str | None, typer.Option("--kind", help="Show one kind, such as models or kernels.")
    ] = None,
    load: Annotated[
        bool, typer.Option("--load", help="Import each plugin to find those that fail.")
    ] = False,
    no_plugins: Annotated[
        bool, typer.Option("--no-plugins", help="Show the selection of serve --no-plugins.")
    ] = False,
    ops: Annotated[
        bool, typer.Option("--ops", help="Show ops and their backends instead.")
    ] = False,
) -> int:
    """Print one line per distribution, kind and status, and why plugins cannot be used."""
    if ops and (load or kind is not None):
        raise ToolsError("--ops cannot be combined with --load or --kind")
    selection = Selection.read(no_plugins=no_plugins)
    installed = Catalog.discover(selection, check=False).all()
    entries = _of_kind(with_unreadable(installed), kind)
    if ops:
        _list_ops(entries, as_json)
        return 0
    if load:
        entries = _loaded(entries)
    if as_json:
        print(json.dumps([record_of(entry) for entry in entries], indent=2))
    else:
        print(table(entries))
    return 0


def table(entries: Sequence[Entry]) -> str:
    """Return the entries as a table, followed by the reasons why some are unusable."""
    if not entries:
        return "No plugins are installed. Run `pip install 'tokenspeed-core[default]'`."
    groups = [
        list(group)
        for _, group in groupby(
            entries, key=lambda e: (e.distribution, e.version, e.kind, e.status, e.api)
        )
    ]
    lines = columns([HEADER, *(_row(group) for group in groups)])
    reasons = list(dict.fromkeys(_reasons(groups)))
    if reasons:
        lines += ["", *reasons]
    return "\n".join(map(printable, lines))


def _row(group: Sequence[Entry]) -> tuple[str, ...]:
    first = group[0]
    return (
        first.distribution,
        first.version,
        first.kind,
        "-" if first.api is None else str(first.api),
        ", ".join(entry.name for entry in group),
        str(first.status),
        origin_column(first),
    )


def _reasons(groups: Sequence[Sequence[Entry]]) -> Iterator[str]:
    for group in groups:
        first = group[0]
        if first.reason:
            names = ", ".join(entry.name for entry in group)
            yield f"{first.distribution} {first.kind} ({names}): {first.reason}"


def _loaded(entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
    """Mark entries as failed if their import fails in another process."""
    from tokenspeed_plugin_tools.lock import enforce_environment
    from tokenspeed_plugin_tools.probe import probe

    enforce_environment()
    errors = {entry: found.error for entry, found in probe(entries).items() if found.error}
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
    """Return the entries of a kind; "kernels" selects all families. Raises ToolsError if there are none."""
    if kind is None:
        return entries
    wanted = kind.removeprefix("tokenspeed.")
    found = tuple(
        entry for entry in entries if entry.kind == wanted or entry.kind.startswith(f"{wanted}.")
    )
    if not found:
        kinds = sorted({entry.kind for entry in entries})
        near = get_close_matches(wanted, kinds, n=1)
        hint = f"did you mean {near[0]}?" if near else f"installed: {', '.join(kinds)}"
        raise ToolsError(f"--kind {kind}: no plugin of this kind is installed; {hint}")
    return found
