"""`tokenspeed plugins freeze`: the installed plugins as a lock, for `tokenspeed serve --plugins-lock`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Annotated

import typer

from tokenspeed_plugin_tools.lock import Locked, installed_now
from tokenspeed_plugin_tools.lock import freeze as locked_now

HEADER = "# Written by `tokenspeed plugins freeze`; `tokenspeed serve --plugins-lock FILE` keeps to it."


def freeze(as_json: Annotated[bool, typer.Option("--json", help="for machines")] = False) -> int:
    """Print a lock of the plugins that can be used here, importing none of them."""
    locked = locked_now(installed_now())
    typer.echo(as_json_text(locked) if as_json else as_toml(locked), nl=False)
    return 0


def as_toml(locked: Mapping[str, Locked]) -> str:
    """Return the text of a lock file, the distributions in the mapping's order."""
    tables = [HEADER + "\n"]
    for name, each in locked.items():
        lines = [f"[{name}]", f"version = {_quoted(each.version)}", f"sha256 = {_quoted(each.sha256)}"]
        lines += [f"editable = {_quoted(each.editable)}"] if each.editable else []
        points = "".join(f"    {_quoted(point)},\n" for point in each.entry_points)
        tables.append("\n".join([*lines, f"entry_points = [\n{points}]\n"]))
    return "\n".join(tables)


def as_json_text(locked: Mapping[str, Locked]) -> str:
    """Return a lock for other programs."""
    return json.dumps({name: dataclasses.asdict(each) for name, each in locked.items()}, indent=2) + "\n"


def _quoted(value: str) -> str:
    """Return a string of TOML, whose escapes are those of JSON."""
    return json.dumps(value, ensure_ascii=False)
