"""`tokenspeed plugins freeze`: the installed plugins as a lock, for `tokenspeed serve --plugins-lock`."""

from __future__ import annotations

from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Annotated

import typer

from tokenspeed_plugin_tools.lock import freeze as locked_now
from tokenspeed_plugin_tools.lock import installed_now
from tokenspeed_plugin_tools.lock_file import LockError, as_json_text, as_toml


def freeze(
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="write it there, whole or not at all, such as plugins.lock",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="for machines")] = False,
) -> int:
    """Print or write a lock of the plugins that can be used here, importing none.

    Raises LockError where code of one is gone, or the file cannot be written.
    """
    locked = locked_now(installed_now())
    gone = [name for name, each in locked.items() if not each.sha256]
    if gone:
        raise LockError(
            f"plugins freeze: of {', '.join(gone)} only metadata is left, and there is no code to lock; "
            "`tokenspeed plugins doctor` has what mends it"
        )
    text = as_json_text(locked) if as_json else as_toml(locked)
    if output is None:
        typer.echo(text, nl=False)
    else:
        _write(output, text)
    return 0


def _write(path: Path, text: str) -> None:
    """Write a file beside another's place and move it there, so that a lock in use is never half of one."""
    try:
        with NamedTemporaryFile(
            "w", dir=path.parent, prefix=f".{path.name}-", encoding="utf-8", delete=False
        ) as file:
            part = Path(file.name)
            try:
                file.write(text)
                file.flush()
                part.chmod(0o644)
                part.replace(path)
            except BaseException:
                part.unlink()
                raise
    except OSError as error:
        raise LockError(
            f"plugins freeze: {path}: {error.strerror}; nothing there was changed"
        ) from error
