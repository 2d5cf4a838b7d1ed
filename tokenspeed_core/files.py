"""Reads the text files of a checkpoint directory, with errors that name the file."""

from __future__ import annotations

import json
from pathlib import Path
from stat import S_ISREG
from typing import Any

from tokenspeed_core.errors import CheckpointError

MAX_BYTES = 256 * 2**20  # an index of the weights may be large


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises CheckpointError."""
    try:
        content = json.loads(read_text(file))
    except RecursionError as error:
        raise CheckpointError(f"cannot read {file}: it is nested too deeply") from error
    except ValueError as error:
        raise CheckpointError(f"cannot read {file}: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{file} must contain a JSON object, found a {type(content).__name__}"
        )
    return content


def read_text(file: Path) -> str:
    """Return the text in a file. Raises CheckpointError, also for a pipe, a device or a huge file."""
    try:
        status = file.stat()
        if not S_ISREG(status.st_mode):
            raise CheckpointError(f"{file} is not a regular file")
        if status.st_size > MAX_BYTES:
            raise CheckpointError(
                f"{file} has {status.st_size} bytes; at most {MAX_BYTES} are expected"
            )
        return file.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise CheckpointError(f"{file.parent} is not a checkpoint: no {file.name}") from error
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"cannot read {file}: {error}") from error
