"""Loads the tokenizer and the chat template of a configuration."""

from __future__ import annotations

import os
from pathlib import Path

from tokenspeed_core.config import Config
from tokenspeed_core.errors import CheckpointError
from tokenspeed_core.text.template import ChatTemplate, load_chat_template
from tokenspeed_core.text.tokenizer import Tokenizer, load_tokenizer


def load_text(config: Config, checkpoint: Path) -> tuple[Tokenizer | None, ChatTemplate | None]:
    """Load the tokenizer and the chat template, from `--tokenizer` or else from the checkpoint.

    Both are None with `--skip-tokenizer-init`. Raises CheckpointError.
    """
    if config.skip_tokenizer_init:
        return None, None
    folder = tokenizer_folder(config, checkpoint)
    if not folder.is_dir():
        raise CheckpointError(
            f"--tokenizer {config.tokenizer}: no such directory; give the path of a directory with the tokenizer"
        )
    tokenizer = load_tokenizer(folder)
    return tokenizer, load_chat_template(folder, tokenizer.special_tokens, config.chat_template)


def tokenizer_folder(config: Config, checkpoint: Path) -> Path:
    """Return the tokenizer's folder: `--tokenizer`, or else the checkpoint."""
    return checkpoint if config.tokenizer is None else Path(os.path.expanduser(config.tokenizer))
