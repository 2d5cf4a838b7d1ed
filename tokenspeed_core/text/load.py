"""A model's tokenizer and chat template, from where they are, and the parsers of replies that the user named."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from tokenspeed_core.api.parsers import ParserContext, ParserSpec, ReplyParser
from tokenspeed_core.config import Config
from tokenspeed_core.errors import CheckpointError
from tokenspeed_core.plugins.catalog import Catalog, make
from tokenspeed_core.plugins.entry import Entry
from tokenspeed_core.text.template import ChatTemplate, load_chat_template
from tokenspeed_core.text.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True, slots=True)
class NamedParser:
    """A parser that the user named, and whose it is."""

    entry: Entry
    spec: ParserSpec

    def make(self, context: ParserContext) -> ReplyParser:
        """Return a parser for one reply. Raises PluginError, in one line, for whatever its factory raises."""
        return make(self.entry, self.spec.load, lambda: self.spec.make(context), ReplyParser)  # type: ignore[type-abstract]


Parsers = tuple[
    NamedParser | None, NamedParser | None
]  # of reasoning, of calls; None: what it finds stays content


def load_text(config: Config, checkpoint: Path) -> tuple[Tokenizer | None, ChatTemplate | None]:
    """Load the tokenizer and the chat template from what `--tokenizer` names, else from the checkpoint.

    Under `--skip-tokenizer-init` there is neither. Raises CheckpointError.
    """
    if config.skip_tokenizer_init:
        return None, None
    folder = checkpoint if config.tokenizer is None else Path(os.path.expanduser(config.tokenizer))
    if not folder.is_dir():
        raise CheckpointError(
            f"--tokenizer {config.tokenizer}: no such directory; download it first"
        )
    tokenizer = load_tokenizer(folder)
    return tokenizer, load_chat_template(folder, tokenizer.special_tokens, config.chat_template)


def find_parsers(config: Config, catalog: Catalog) -> Parsers:
    """Return the parsers that a configuration names. Raises PluginError, in one line."""
    return (
        _load(catalog.get("reasoning_parsers", config.reasoning_parser), catalog)
        if config.reasoning_parser
        else None,
        _load(catalog.get("tool_parsers", config.tool_call_parser), catalog)
        if config.tool_call_parser
        else None,
    )


def _load(entry: Entry, catalog: Catalog) -> NamedParser:
    parser = NamedParser(entry, catalog.need(entry, ParserSpec))
    parser.make(ParserContext())
    return parser
