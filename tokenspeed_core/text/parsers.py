"""The parsers of replies that the user named."""

from __future__ import annotations

from tokenspeed_core.config import Config
from tokenspeed_core.parsers import ParserContext, ParserSpec, ReplyParser
from tokenspeed_core.plugins.catalog import Catalog, make
from tokenspeed_core.plugins.entry import Entry

Parsers = tuple[ParserSpec | None, ParserSpec | None]  # of reasoning, of tool calls; None: what it finds stays content


def find_parsers(config: Config, catalog: Catalog) -> Parsers:
    """Return the parsers that a configuration names. Raises PluginError, in one line."""
    return (
        _load(catalog.get("reasoning_parsers", config.reasoning_parser), catalog) if config.reasoning_parser else None,
        _load(catalog.get("tool_parsers", config.tool_call_parser), catalog) if config.tool_call_parser else None,
    )


def _load(entry: Entry, catalog: Catalog) -> ParserSpec:
    spec = catalog.need(entry, ParserSpec)
    make(entry, spec.load, lambda: spec.make(ParserContext()), ReplyParser)  # type: ignore[type-abstract]
    return spec
