"""`tokenspeed plugins verify`: what is installed beside a lock, importing nothing of it."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from tokenspeed_plugin_tools.lock import installed_now, mismatches
from tokenspeed_plugin_tools.lock_file import read_lock


def verify(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="a lock that `plugins freeze` wrote")
    ] = "plugins.lock",
    as_json: Annotated[bool, typer.Option("--json", help="for machines")] = False,
) -> int:
    """Name every mismatch with a lock and what mends it; the exit status is 1 where there is one."""
    locked = read_lock(file)
    lines = mismatches(locked, installed_now())
    if as_json:
        typer.echo(
            json.dumps({"file": file, "locked": list(locked), "mismatches": lines}, indent=2)
        )
    else:
        typer.echo("\n".join(lines) or f"{file}: all {len(locked)} distributions are as locked")
    return 1 if lines else 0
