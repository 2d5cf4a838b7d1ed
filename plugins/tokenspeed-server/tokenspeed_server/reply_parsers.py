"""The reasoning and tool-call parsers of a model: those that the configuration names, or those that fit."""

from __future__ import annotations

from dataclasses import dataclass

from tokenspeed_core.api import ParserContext, ParserSpec, ReplyParser
from tokenspeed_core.commands import DEFAULTS, Catalog, Entry
from tokenspeed_core.commands.serving import (
    ResolvedCheckpoint,
    make,
    read_chat_templates,
    tokenizer_folder,
)
from tokenspeed_server.settings import ServerConfig

AUTO, NONE = "auto", "none"


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """The properties of a model by which `auto` chooses parsers."""

    template: str = ""  # the text of the chat templates
    architecture: str = ""  # from config.json


def model_traits(config: ServerConfig, checkpoint: ResolvedCheckpoint) -> ModelTraits:
    """Return the traits by which `auto` chooses parsers. Raises CheckpointError."""
    if config.skip_tokenizer_init:
        return ModelTraits()
    folder = tokenizer_folder(config, checkpoint.path)
    templates = read_chat_templates(folder, config.chat_template) if folder.is_dir() else ()
    return ModelTraits("\n".join(templates), checkpoint.info.architecture)


@dataclass(frozen=True, slots=True)
class NamedParser:
    """A parser, the entry point it comes from, and why it was chosen."""

    entry: Entry
    spec: ParserSpec
    reason: str = ""

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

_FLAGS = {"reasoning_parsers": "--reasoning-parser", "tool_parsers": "--tool-call-parser"}


def find_parsers(
    config: ServerConfig, catalog: Catalog, model: ModelTraits | None = None
) -> Parsers:
    """Return the parsers that a configuration names, or that fit the model. Raises PluginError.

    Without a model, `auto` finds none: only the names are checked.
    """
    return (
        _find("reasoning_parsers", config.reasoning_parser, catalog, model),
        _find("tool_parsers", config.tool_call_parser, catalog, model),
    )


def describe_parsers(config: ServerConfig, parsers: Parsers) -> str:
    """Return a line that says which parsers read the replies, and why."""
    reasoning, tools = parsers
    return (
        f"parsers: reasoning {_describe(config.reasoning_parser, reasoning)}, "
        f"tool calls {_describe(config.tool_call_parser, tools)}"
    )


def _describe(name: str, parser: NamedParser | None) -> str:
    if parser is not None:
        return f"{parser.entry.name} ({parser.reason})"
    return "none (chosen)" if name == NONE else "none (the model's files suggest none)"


def _find(kind: str, name: str, catalog: Catalog, model: ModelTraits | None) -> NamedParser | None:
    if name == NONE:
        return None
    if name == AUTO:
        parser = None if model is None else _choose(kind, catalog, model)
        if parser is None:
            return None
    else:
        entry = catalog.get(kind, name, flag=_FLAGS[kind])
        parser = NamedParser(entry, catalog.need(entry, ParserSpec), "chosen")
    # A parser that cannot be made ends the start, not the first request.
    parser.make(ParserContext())
    return parser


def _choose(kind: str, catalog: Catalog, model: ModelTraits) -> NamedParser | None:
    """Return the parser with the most marks in the template, else one for the architecture."""
    loaded = [(entry, catalog.load(entry, ParserSpec)) for entry in catalog.entries(kind)]
    specs = [(entry, spec) for entry, spec in loaded if spec is not None]
    by_template = [
        (entry, spec)
        for entry, spec in specs
        if spec.template_marks and all(mark in model.template for mark in spec.template_marks)
    ]
    if by_template:
        entry, spec = max(by_template, key=_rank)
        marks = " and ".join(spec.template_marks)
        return NamedParser(entry, spec, f"the chat template has {marks}")
    by_architecture = [
        (entry, spec) for entry, spec in specs if model.architecture in spec.architectures
    ]
    if by_architecture:
        entry, spec = max(by_architecture, key=_rank)
        return NamedParser(entry, spec, f"the architecture is {model.architecture}")
    return None


def _rank(candidate: tuple[Entry, ParserSpec]) -> tuple[int, bool, str]:
    """Order candidates: more marks first, then the default distributions, then by name."""
    entry, spec = candidate
    return len(spec.template_marks), entry.distribution in DEFAULTS, entry.name
