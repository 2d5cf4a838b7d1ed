"""Reading the text files of a checkpoint directory, with errors that name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenspeed_core.errors import CheckpointError


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises CheckpointError."""
    try:
        content = json.loads(read_text(file))
    except ValueError as error:
        raise CheckpointError(f"cannot read {file}: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{file} must contain a JSON object, found a {type(content).__name__}"
        )
    return content


def read_text(file: Path) -> str:
    """Return the text in a file. Raises CheckpointError."""
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise CheckpointError(f"{file.parent} is not a checkpoint: no {file.name}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read {file}: {error}") from error
