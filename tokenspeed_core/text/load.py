"""A model's tokenizer and chat template, from where they are."""

from __future__ import annotations

from pathlib import Path

from tokenspeed_core.config import Config
from tokenspeed_core.errors import CheckpointError
from tokenspeed_core.text.template import ChatTemplate, load_chat_template
from tokenspeed_core.text.tokenizer import Tokenizer, load_tokenizer


def load_text(config: Config, checkpoint: Path) -> tuple[Tokenizer | None, ChatTemplate | None]:
    """Load the tokenizer and the chat template from what `--tokenizer` names, else from the checkpoint.

    Under `--skip-tokenizer-init` there is neither. Raises CheckpointError.
    """
    if config.skip_tokenizer_init:
        return None, None
    folder = checkpoint if config.tokenizer is None else Path(config.tokenizer).expanduser()
    if not folder.is_dir():
        raise CheckpointError(f"--tokenizer {config.tokenizer}: no such directory; download it first")
    tokenizer = load_tokenizer(folder)
    return tokenizer, load_chat_template(folder, tokenizer.special_tokens, config.chat_template)
