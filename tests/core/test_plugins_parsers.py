"""Reply parsers from plugins: found by name, and checked before the server starts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
from tokenspeed_testing.parser import ParserConformance

from tokenspeed_core.api import ParserContext, ParserSpec, ReplyEvent
from tokenspeed_core.config import Config
from tokenspeed_core.engine.reply_parsers import NamedParser, find_parsers
from tokenspeed_core.errors import ConfigError, PluginError
from tokenspeed_core.plugins import Catalog, Selection

HERE = "parsers_under_test"


class Plain:
    """Finds nothing."""

    def __init__(self, context: ParserContext) -> None:
        pass

    def feed(self, text: str) -> Sequence[ReplyEvent]:
        return [ReplyEvent("content", text)]

    def finish(self) -> Sequence[ReplyEvent]:
        return []


class Forgetful(Plain):
    """Loses what stands behind a line end in one delta."""

    def feed(self, text: str) -> Sequence[ReplyEvent]:
        text = text.partition("\n")[0]
        return super().feed(text) if text else []


class Hasty(Plain):
    """Takes a mark for one only where it comes in one delta."""

    def feed(self, text: str) -> Sequence[ReplyEvent]:
        text = text.replace("<call>", "")
        return super().feed(text) if text else []


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


@pytest.fixture
def catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Catalog:
    monkeypatch.setitem(sys.modules, HERE, sys.modules[__name__])
    info = tmp_path / "site" / "acme-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    tools = "".join(
        f"{name.lower()} = {HERE}:{name} [api1]\n"
        for name in ("SPEC", "BROKEN", "NOTHING", "DANGLING")
    )
    (info / "entry_points.txt").write_text(
        f"[tokenspeed.tool_parsers]\n{tools}odd = {HERE}:Plain [api1]\n[tokenspeed.reasoning_parsers]\n"
        f"thinks = {HERE}:SPEC [api1]\n"
    )
    return Catalog.discover(
        Selection.read({}), distributions=distributions(path=[str(tmp_path / "site")])
    )


def test_named_parsers_are_found_and_none_by_default(catalog: Catalog) -> None:
    assert find_parsers(Config(), catalog) == (None, None)
    tool = NamedParser(catalog.get("tool_parsers", "spec"), SPEC)
    thinks = NamedParser(catalog.get("reasoning_parsers", "thinks"), SPEC)
    assert find_parsers(Config(tool_call_parser="spec"), catalog) == (None, tool)
    assert find_parsers(Config(reasoning_parser="thinks", tool_call_parser="spec"), catalog) == (
        thinks,
        tool,
    )


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("broken", "failed in parsers_under_test:broken: RuntimeError: no grammar"),
        ("nothing", "returned a dict, not a ReplyParser"),
        ("dangling", "AttributeError"),
        ("odd", "is a type, not a ParserSpec"),
        ("specs", "did you mean spec?"),
        ("thinks", "no tool_parsers named 'thinks'"),
    ],
)
def test_unusable_parser_ends_the_start(catalog: Catalog, name: str, said: str) -> None:
    with pytest.raises(PluginError) as caught:
        find_parsers(Config(tool_call_parser=name), catalog)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    if name not in ("specs", "thinks"):
        assert "--tool-call-parser" in str(caught.value)


def test_parser_without_tokenizer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--tool-call-parser .*--skip-tokenizer-init"):
        Config.from_keywords(tool_call_parser="spec", skip_tokenizer_init=True)


@pytest.mark.parametrize(
    ("parser", "asked"),
    [
        (Forgetful, "test_result_does_not_depend_on_cuts"),
        (Forgetful, "test_other_text_is_unchanged"),
        (Hasty, "test_result_does_not_depend_on_cuts"),
        (Hasty, "test_truncated_reply_loses_nothing"),
        (Hasty, "test_example_is_parsed"),
        (Empty, "test_events_are_ordered_and_not_empty"),
    ],
)
def test_kit_finds_parsers_that_break_the_contract(
    parser: type[Plain], asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, HERE, sys.modules[__name__])
    spec = ParserSpec(f"{HERE}:{parser.__name__}", 'a\n<call>{"city": "Paris"}')

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
        if name.startswith("test_") and "its_example" not in name:
            getattr(Suite(), name)()
