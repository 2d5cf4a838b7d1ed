"""`tokenspeed plugins freeze`: the installed plugins as a lock, for `tokenspeed serve --plugins-lock`."""

from __future__ import annotations

from typing import Annotated

import typer

from tokenspeed_plugin_tools.lock import freeze as locked_now
from tokenspeed_plugin_tools.lock import installed_now
from tokenspeed_plugin_tools.lock_file import LockError, as_json_text, as_toml


def freeze(as_json: Annotated[bool, typer.Option("--json", help="for machines")] = False) -> int:
    """Print a lock of the plugins that can be used here, importing none. Raises LockError where code of one is gone."""
    locked = locked_now(installed_now())
    gone = [name for name, each in locked.items() if not each.sha256]
    if gone:
        raise LockError(f"plugins freeze: of {', '.join(gone)} only metadata is left, and there is no code to lock; "
                        "`tokenspeed plugins doctor` has what mends it")
    typer.echo(as_json_text(locked) if as_json else as_toml(locked), nl=False)
    return 0
