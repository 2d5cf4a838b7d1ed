"""The conformance kit on XGrammar."""

from __future__ import annotations

from typing import Any

import pytest
from tokenspeed_grammars_xgrammar import SPEC
from tokenspeed_grammars_xgrammar.schema import check_schema
from tokenspeed_testing.grammar import GrammarConformance

from tokenspeed_core.api import GrammarError

pytest.importorskip("xgrammar")


class TestXGrammar(GrammarConformance):
    spec = SPEC


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {}},
        {"type": "array", "items": {"type": "number", "multipleOf": 3}},
        {"properties": {"x": {"anyOf": [{"type": "string", "format": "mine"}]}}},
        {"$defs": {"x": {"uniqueItems": True}}},
        {"$ref": "http://127.0.0.1:1/schema.json"},
        {"type": "text"},
        {"items": 5},
    ],
)
def test_ignored_keywords_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(GrammarError):
        check_schema(schema)
