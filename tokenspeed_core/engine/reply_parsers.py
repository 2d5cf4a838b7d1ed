"""The reasoning and tool-call parsers that a configuration names."""

from __future__ import annotations

from dataclasses import dataclass

from tokenspeed_core.api.parsers import ParserContext, ParserSpec, ReplyParser
from tokenspeed_core.config import Config
from tokenspeed_core.plugins.catalog import Catalog, make
from tokenspeed_core.plugins.entry import Entry


@dataclass(frozen=True, slots=True)
class NamedParser:
    """A parser that the user chose, and the entry point it comes from."""

    entry: Entry
    spec: ParserSpec

    def make(self, context: ParserContext) -> ReplyParser:
        """Return a parser for one reply. Raises PluginError if the plugin's factory fails."""
        return make(
            self.entry,
            self.spec.load,
            lambda: self.spec.make(context),
            ReplyParser,  # type: ignore[type-abstract]
        )


# The reasoning parser and the tool-call parser. Without one, the text it would parse stays content.
Parsers = tuple[NamedParser | None, NamedParser | None]


def find_parsers(config: Config, catalog: Catalog) -> Parsers:
    """Return the parsers that a configuration names. Raises PluginError."""
    return (
        _find("reasoning_parsers", config.reasoning_parser, catalog),
        _find("tool_parsers", config.tool_call_parser, catalog),
    )


def _find(kind: str, name: str | None, catalog: Catalog) -> NamedParser | None:
    if not name:
        return None
    entry = catalog.get(kind, name)
    parser = NamedParser(entry, catalog.need(entry, ParserSpec))
    # A parser that cannot be made ends the start, not the first request.
    parser.make(ParserContext())
    return parser
