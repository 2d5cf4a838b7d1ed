"""`tokenspeed plugins freeze`: write a lock file."""

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
        typer.Option("--output", "-o", metavar="FILE", help="Write to a file instead of stdout."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Write a lock of the usable plugins. Raises LockError if code is missing or the file cannot be written."""
    locked = locked_now(installed_now())
    missing = [name for name, each in locked.items() if not each.sha256]
    if missing:
        raise LockError(
            f"plugins freeze: the code of {', '.join(missing)} is missing. "
            "Run `tokenspeed plugins doctor` for details."
        )
    text = as_json_text(locked) if as_json else as_toml(locked)
    if output is None:
        typer.echo(text, nl=False)
    else:
        _write(output, text)
    return 0


def _write(path: Path, text: str) -> None:
    """Replace a file in one step, so that a lock in use is never incomplete."""
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
            finally:
                part.unlink(missing_ok=True)  # if writing was interrupted
    except OSError as error:
        raise LockError(f"plugins freeze: {path}: {error.strerror}") from error
