"""`tokenspeed plugins verify`: compare the installed plugins with a lock file."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from tokenspeed_plugin_tools.lock import installed_now, mismatches
from tokenspeed_plugin_tools.lock_file import read_lock


def verify(
    file: Annotated[str, typer.Argument(metavar="FILE", help="The lock file.")] = "plugins.lock",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Print every mismatch and how to repair it; return 1 if there is any."""
    locked = read_lock(file)
    lines = mismatches(locked, installed_now())
    if as_json:
        record = {"file": file, "locked": list(locked), "mismatches": lines}
        typer.echo(json.dumps(record, indent=2))
    else:
        typer.echo("\n".join(lines) or f"{file}: all {len(locked)} distributions match")
    return 1 if lines else 0
