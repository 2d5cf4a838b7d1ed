"""Every installed grammar backend, on generated schemas and regular expressions, against jsonschema and re."""

from __future__ import annotations

import json
import random
import re
from functools import cache
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenspeed_testing.grammar import VOCABULARY, text_of, walk

from tokenspeed_core.api.grammars import GrammarCompiler, GrammarError, GrammarSpec
from tokenspeed_core.plugins.catalog import Catalog

BACKENDS = [entry.name for entry in Catalog.discover().entries("grammars")]
NAMES = st.sampled_from(["a", "b", "name", "x y"])
LEAVES = st.one_of(
    st.sampled_from(
        [
            {"type": "null"},
            {"type": "boolean"},
            {"type": "number"},
            {"const": {"k": [1, None]}},
            {"type": "string", "pattern": "^[a-f]{2,3}$"},
            {"type": "string", "format": "date"},
        ]
    ),
    st.builds(
        lambda low, width: {"type": "integer", "minimum": low, "maximum": low + width},
        st.integers(-20, 20),
        st.integers(0, 30),
    ),
    st.builds(
        lambda low, width: {"type": "string", "minLength": low, "maxLength": low + width},
        st.integers(0, 3),
        st.integers(0, 4),
    ),
    st.builds(
        lambda values: {"enum": values},
        st.lists(st.sampled_from(["red", "é", 'q"', 3, None]), min_size=1, unique=True),
    ),
)


def _object(properties: dict[str, Any], num_required: int) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties)[:num_required],
        "additionalProperties": False,
    }


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(_object, st.dictionaries(NAMES, inner, max_size=3), st.integers(0, 3)),
        st.builds(
            lambda item, low: {
                "type": "array",
                "items": item,
                "minItems": low,
                "maxItems": low + 1,
            },
            inner,
            st.integers(0, 2),
        ),
        st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=5,
)
ATOMS = st.sampled_from(["a", "[0-9]", "[^b]", "(yes|no)", r"\d", r"\w", r"\.", " "])
REGEXES = st.lists(
    st.builds(str.__add__, ATOMS, st.sampled_from(["", "?", "{1,3}", "+"])), min_size=1, max_size=5
).map("".join)


@cache
def compiler(name: str) -> GrammarCompiler:
    catalog = Catalog.discover()
    return catalog.need(catalog.get("grammars", name), GrammarSpec).make(VOCABULARY)


def finished(name: str, kind: Any, text: str, seed: int) -> str | None:
    """Return the text of a random walk, None if it did not end or if the backend refuses the grammar."""
    try:
        matcher = compiler(name).compile(kind, text).matcher()
    except GrammarError:
        return None
    tokens = walk(matcher, random.Random(seed))
    return text_of(tokens) if matcher.is_terminated else None


@pytest.mark.parametrize("name", BACKENDS)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=SCHEMAS, seed=st.integers(0, 1000))
def test_any_output_fits_its_schema(name: str, schema: dict[str, Any], seed: int) -> None:
    text = finished(name, "json", json.dumps(schema), seed)
    if text is not None:
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize("name", BACKENDS)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(regex=REGEXES, seed=st.integers(0, 1000))
def test_any_output_matches_its_regex(name: str, regex: str, seed: int) -> None:
    text = finished(name, "regex", regex, seed)
    if text is not None:
        assert re.fullmatch(regex, text), f"{text!r} does not match {regex!r}"


@pytest.mark.parametrize("name", BACKENDS)
def test_walks_end_and_grammars_are_supported(name: str) -> None:
    schema = _object({"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}}, 2)
    texts = [finished(name, "json", json.dumps(schema), seed) for seed in range(10)]
    texts += [finished(name, "regex", "(yes|no)+[0-9]{1,3}", seed) for seed in range(10)]
    assert sum(text is not None for text in texts) > 10
