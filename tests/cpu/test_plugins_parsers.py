"""Reply parsers from plugins: found by name, and checked before the server starts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
from tokenspeed_parsers import QWEN
from tokenspeed_server.reply_parsers import (
    ModelTraits,
    NamedParser,
    describe_parsers,
    find_parsers,
)
from tokenspeed_server.settings import ServerConfig
from tokenspeed_testing.parser import ParserConformance

from tokenspeed_core.api import ParserContext, ParserExample, ParserSpec, ReplyEvent
from tokenspeed_core.errors import ConfigError, PluginError
from tokenspeed_core.plugins import Catalog, Selection

HERE = "parsers_under_test"
NEED_EXAMPLES = (
    "test_examples_cover_the_format",
    "test_examples_are_parsed",
    "test_truncated_reply_loses_nothing",
)


class Plain:
    """Finds nothing."""

    def __init__(self, context: ParserContext) -> None:
        pass

    def feed(self, text: str) -> Sequence[ReplyEvent]:
        return [ReplyEvent("content", text)]

    def finish(self) -> Sequence[ReplyEvent]:
        return []


class Forgetful(Plain):
    """Loses the text after a line end within a delta."""

    def feed(self, text: str) -> Sequence[ReplyEvent]:
        text = text.partition("\n")[0]
        return super().feed(text) if text else []


class Hasty(Plain):
    """Takes a mark for one only where it comes in one delta."""

    def feed(self, text: str) -> Sequence[ReplyEvent]:
        text = text.replace("<call>", "")
        return super().feed(text) if text else []


class OneCall(Plain):
    """Drops every call but the first, and calls nothing in plain text."""

    def __init__(self, context: ParserContext) -> None:
        self.parser = QWEN.make(context)
        self.num_calls = 0

    def feed(self, text: str) -> Sequence[ReplyEvent]:
        return self.without_second(self.parser.feed(text))

    def finish(self) -> Sequence[ReplyEvent]:
        return self.without_second(self.parser.finish())

    def without_second(self, events: Sequence[ReplyEvent]) -> Sequence[ReplyEvent]:
        kept = []
        for event in events:
            self.num_calls += event.kind == "call"
            if event.kind == "content" or self.num_calls < 2:
                kept.append(event)
        return kept


class Slow(Plain):
    """Reads the text from its start for each delta."""

    def __init__(self, context: ParserContext) -> None:
        self.text = ""

    def feed(self, text: str) -> Sequence[ReplyEvent]:
        self.text += text
        sorted(self.text)
        return super().feed(text)


class Empty(Plain):
    """Gives events without text."""

    def feed(self, text: str) -> Sequence[ReplyEvent]:
        return [*super().feed(text), ReplyEvent("content", "")]


def broken(context: ParserContext) -> Plain:
    raise RuntimeError("no grammar")


def nothing(context: ParserContext) -> dict[str, str]:
    return {}


SPEC, BROKEN, NOTHING = (ParserSpec(f"{HERE}:{name}") for name in ("Plain", "broken", "nothing"))
DANGLING = ParserSpec(f"{HERE}:Missing")
ONE = ParserSpec(f"{HERE}:Plain", template_marks=("<call>",), architectures=("AcmeForCausalLM",))
TWO = ParserSpec(f"{HERE}:Plain", template_marks=("<call>", "<argument>"))


@pytest.fixture
def catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Catalog:
    monkeypatch.setitem(sys.modules, HERE, sys.modules[__name__])
    info = tmp_path / "site" / "acme-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    tools = "".join(
        f"{name.lower()} = {HERE}:{name} [api1]\n"
        for name in ("SPEC", "BROKEN", "NOTHING", "DANGLING", "ONE", "TWO")
    )
    (info / "entry_points.txt").write_text(
        f"[tokenspeed.tool_parsers]\n{tools}odd = {HERE}:Plain [api1]\n[tokenspeed.reasoning_parsers]\n"
        f"thinks = {HERE}:SPEC [api1]\n"
    )
    return Catalog.discover(
        Selection.read({}), distributions=distributions(path=[str(tmp_path / "site")])
    )


def test_named_parsers_are_found(catalog: Catalog) -> None:
    assert find_parsers(ServerConfig(), catalog) == (None, None)
    tool = NamedParser(catalog.get("tool_parsers", "spec"), SPEC, "chosen")
    thinks = NamedParser(catalog.get("reasoning_parsers", "thinks"), SPEC, "chosen")
    assert find_parsers(ServerConfig(tool_call_parser="spec"), catalog) == (None, tool)
    assert find_parsers(
        ServerConfig(reasoning_parser="thinks", tool_call_parser="spec"), catalog
    ) == (
        thinks,
        tool,
    )


@pytest.mark.parametrize(
    ("template", "architecture", "name"),
    [
        ("", "", None),
        ("{{ '<call>' }}", "", "one"),
        ("{{ '<call>' + '<argument>' }}", "", "two"),
        ("{{ '<argument>' }}", "", None),
        ("", "AcmeForCausalLM", "one"),
        ("{{ '<call>' + '<argument>' }}", "AcmeForCausalLM", "two"),
    ],
)
def test_auto_chooses_by_template_then_by_architecture(
    catalog: Catalog, template: str, architecture: str, name: str | None
) -> None:
    traits = ModelTraits(template, architecture)
    parsers = find_parsers(ServerConfig(), catalog, traits)
    assert (parsers[0], parsers[1] and parsers[1].entry.name) == (None, name)
    off = ServerConfig(tool_call_parser="none")
    assert find_parsers(off, catalog, traits) == (None, None)
    assert (name or "none") in describe_parsers(ServerConfig(), parsers)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("broken", "failed in parsers_under_test:broken: RuntimeError: no grammar"),
        ("nothing", "returned dict, expected ReplyParser"),
        ("dangling", "AttributeError"),
        ("odd", "is of type type, expected ParserSpec"),
        ("specs", "did you mean spec?"),
        ("thinks", "no tool_parsers named 'thinks'"),
    ],
)
def test_unusable_parser_ends_the_start(catalog: Catalog, name: str, expected: str) -> None:
    with pytest.raises(PluginError) as caught:
        find_parsers(ServerConfig(tool_call_parser=name), catalog)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "--tool-call-parser" in str(caught.value)


def test_parser_without_tokenizer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--tool-call-parser .*--skip-tokenizer-init"):
        ServerConfig.from_keywords(tool_call_parser="spec", skip_tokenizer_init=True)


@pytest.mark.parametrize(
    ("parser", "asked"),
    [
        (Forgetful, "test_result_does_not_depend_on_cuts"),
        (Forgetful, "test_no_text_is_lost"),
        (Hasty, "test_result_does_not_depend_on_cuts"),
        (Hasty, "test_truncated_reply_loses_nothing"),
        (Hasty, "test_examples_are_parsed"),
        (Hasty, "test_examples_cover_the_format"),
        (OneCall, "test_examples_are_parsed"),
        (OneCall, "test_no_text_is_lost"),
        (Slow, "test_time_is_linear"),
        (Empty, "test_events_are_ordered_and_not_empty"),
    ],
)
def test_kit_finds_parsers_that_break_the_contract(
    parser: type[Plain], asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, HERE, sys.modules[__name__])
    calls = (("get_weather", {"city": "Paris"}),)
    example = ParserExample('a\n<call>{"city": "Paris"}', content="a", calls=calls)
    examples = QWEN.examples if parser is OneCall else (example,)
    spec = ParserSpec(f"{HERE}:{parser.__name__}", examples)

    class Suite(ParserConformance):
        kind = "tool_parsers"

    suite: Any = Suite()
    Suite.spec = spec
    with pytest.raises(AssertionError):
        getattr(suite, asked)()


def test_kit_accepts_a_parser_that_finds_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, HERE, sys.modules[__name__])

    class Suite(ParserConformance):
        spec = SPEC
        kind = "reasoning_parsers"

    for name in dir(Suite):
        if name.startswith("test_") and name not in NEED_EXAMPLES:
            getattr(Suite(), name)()
