"""The conformance kit: of the distribution, and of each of its parsers."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from unittest import SkipTest

import pytest
from tokenspeed_testing.distribution import DistributionConformance
from tokenspeed_testing.parser import ParserConformance

KINDS = ("tool_parsers", "reasoning_parsers")
ENTRIES = [
    (kind, entry)
    for kind in KINDS
    for entry in entry_points(group=f"tokenspeed.{kind}")
    if entry.value.startswith("tokenspeed_parsers:")
]
CHECKS = [name for name in vars(ParserConformance) if name.startswith("test_")]


class TestDistribution(DistributionConformance):
    distribution = "tokenspeed-parsers"


@pytest.mark.parametrize(
    ("kind", "entry"), ENTRIES, ids=[f"{kind}-{entry.name}" for kind, entry in ENTRIES]
)
@pytest.mark.parametrize("check", CHECKS)
def test_parser_conforms(check: str, kind: str, entry: EntryPoint) -> None:
    suite = type("Suite", (ParserConformance,), {"spec": entry.load(), "kind": kind})()
    if entry.name != "passthrough":
        getattr(suite, check)()
        return
    try:
        getattr(suite, check)()
    except SkipTest as reason:
        pytest.skip(str(reason))  # it has no examples
