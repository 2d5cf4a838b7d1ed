"""Bodies that are costly to parse or to validate are refused before they hold the interpreter's lock."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenspeed_server.api_body import parse_body
from tokenspeed_server.body_limits import (
    BLOCK_BYTES,
    CONTAINER_COST,
    ENTRY_COST,
    check_cost,
    check_keys,
    max_cost,
    shown,
)
from tokenspeed_server.protocol import ChatRequest, CompletionRequest

from tokenspeed_core.commands.serving import BadRequestError

USER = {"role": "user", "content": "hi"}
MAX_CPU_SECONDS = 0.5  # of this process; 28 s without limits
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def many_keys() -> dict[str, Any]:
    """Return an object of many keys."""
    return {f"k{i}": "x" for i in range(280_000)}


def cost(value: Any) -> int:
    """Return an upper bound of the cost of a value."""
    if isinstance(value, dict):
        entries = (ENTRY_COST + 1 + cost(key) + cost(each) for key, each in value.items())
        return CONTAINER_COST + sum(entries)
    if isinstance(value, list):
        return CONTAINER_COST + sum(1 + cost(each) for each in value)
    return json.dumps(value).count("\\")


@settings(max_examples=40)
@given(JSON)
def test_limit_counts_values_and_not_text(value: Any) -> None:
    check_cost(json.dumps(value).encode(), cost(value))


@settings(max_examples=40)
@given(st.lists(st.text(), min_size=1))
def test_more_values_than_the_limit_are_refused(texts: list[str]) -> None:
    with pytest.raises(BadRequestError):
        check_cost(json.dumps(texts).encode(), CONTAINER_COST + len(texts) - 2)


def test_text_that_spans_blocks_is_still_text() -> None:
    check_cost(json.dumps({"a": "[," * BLOCK_BYTES}).encode(), 10)
    with pytest.raises(BadRequestError):
        check_cost(json.dumps(["x" * (2 * BLOCK_BYTES), *[1] * 20]).encode(), 10)


def test_limit_admits_a_whole_context_of_ids() -> None:
    prompt = json.dumps({"prompt": [12345] * 1_000_000}).encode()
    check_cost(prompt, max_cost(1_000_000))


ATTACKS: dict[str, Callable[[], dict[str, Any]]] = {
    "stop": lambda: {"stop": [1] * 1_300_000},
    "stop_token_ids": lambda: {"stop_token_ids": ["a"] * 800_000},
    "messages": lambda: {"messages": [1] * 1_300_000},
    "empty messages": lambda: {"messages": [{}] * 16_000},
    "parts": lambda: {"messages": [{"role": "user", "content": [1] * 1_300_000}]},
    "wrong parts": lambda: {"messages": [{"role": "user", "content": [{"type": "x"}] * 300_000}]},
    "calls": lambda: {"messages": [{**USER, "tool_calls": [1] * 1_300_000}]},
    "tools": lambda: {"tools": [1] * 1_300_000},
    "keys of a tool": lambda: {
        "tools": [{"type": "function", "function": {**many_keys(), "name": "f"}}]
    },
    "keys of a bias": lambda: {"logit_bias": many_keys()},
    "keys of the body": many_keys,
}


@cache
def attack(name: str) -> bytes:
    """Return the body of an attack."""
    return json.dumps({"messages": [USER], **ATTACKS[name]()}).encode()


@pytest.mark.parametrize("name", ATTACKS)
def test_validation_of_wrong_items_takes_no_time(name: str) -> None:
    body = attack(name)
    started = time.process_time()
    with pytest.raises(BadRequestError):
        parse_body(body, ChatRequest)
    assert time.process_time() - started < MAX_CPU_SECONDS


@pytest.mark.parametrize("name", ATTACKS)
def test_costly_body_is_refused_before_parsing(name: str) -> None:
    body = attack(name)
    started = time.process_time()
    with pytest.raises(BadRequestError):
        check_cost(body, 40_000)
    assert time.process_time() - started < MAX_CPU_SECONDS / 2


def test_objects_of_models_have_few_keys() -> None:
    many = dict.fromkeys(map(str, range(400)))
    for raw in (
        many,
        {"messages": [many]},
        {"messages": [{"content": [many]}]},
        {"messages": [{"tool_calls": [{"function": many}]}]},
        {"tools": [{"function": many}]},
        {"logit_bias": many},
    ):
        with pytest.raises(BadRequestError):
            check_keys(raw)
    check_keys({"metadata": many, "tools": [{"function": {"parameters": many}}]})


def test_long_invalid_value_is_truncated_in_the_error() -> None:
    large = [10**5000, "x" * 10**6, "\ud800", [1] * 10**6, {"a": [1] * 10**6}]
    for value in (*large, 1.5, None, True, 2**70):
        text = shown(value)
        assert 0 < len(text) <= 80
        text.encode()


@pytest.mark.parametrize("field", ["max_tokens", "seed", "n"])
def test_integer_of_4300_digits_is_rejected(field: str) -> None:
    for digits in (4299, 5000):
        body = b'{"prompt": "a", "%s": %s}' % (field.encode(), b"9" * digits)
        with pytest.raises(BadRequestError):
            parse_body(body, CompletionRequest)
