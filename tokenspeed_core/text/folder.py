"""Where a model's tokenizer is."""

from __future__ import annotations

from pathlib import Path

from tokenspeed_core.errors import CheckpointError


def text_folder(checkpoint: Path, tokenizer: str | None) -> Path:
    """Return the folder of the tokenizer and chat template: what `--tokenizer` names, else the checkpoint's.

    Raises CheckpointError where there is no such folder.
    """
    if tokenizer is None:
        return checkpoint
    folder = Path(tokenizer).expanduser()
    if not folder.is_dir():
        raise CheckpointError(f"--tokenizer {tokenizer}: no such directory; download it first")
    return folder
