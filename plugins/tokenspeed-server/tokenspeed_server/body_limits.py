"""Bounds on the cost of a JSON body, checked before it is parsed.

The parser holds the interpreter's lock, so a stream of another client waits while it runs. Its time
depends on the number of values and escape sequences, not only on the number of bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tokenspeed_core.commands.serving import BadRequestError

MIN_MAX_COST = 500_000  # the smallest default limit; see `max_cost`
CONTAINER_COST = 4  # of an object or array, relative to a number or an escape sequence
ENTRY_COST = 4  # of a key of an object
BLOCK_BYTES = 2**20  # counted at once
MAX_KEYS = 256  # of an object that is checked against a model
MAX_ITEMS = 16_384  # of a list of items that are checked
MAX_SHOWN = 80  # characters of a wrong value in a message

_COSTS = {b",": 1, b"[": CONTAINER_COST, b"{": CONTAINER_COST, b":": ENTRY_COST}


def max_bytes(num_tokens: int) -> int:
    """Return the limit of a body's size for a context of `num_tokens`."""
    return max(4 * 2**20, 32 * num_tokens)


def max_cost(num_tokens: int) -> int:
    """Return the limit for a context of `num_tokens`, which may be sent as a list of ids."""
    return max(MIN_MAX_COST, 2 * num_tokens)


def check_cost(data: bytes, limit: int = MIN_MAX_COST) -> None:
    """Raise BadRequestError if a body has too many values to parse without delaying others."""
    num_escapes = data.count(b"\\")
    in_text = sum(cost * data.count(sign) for sign, cost in _COSTS.items())
    if num_escapes + in_text > limit:  # text has commas and brackets too: count outside strings
        cost = num_escapes if num_escapes > limit else num_escapes + _cost_of_values(data, limit)
        if cost > limit:
            raise BadRequestError(
                f"the body has too many values to parse: more than {limit}, counting each number "
                f"and escape sequence as 1 and each key, object and array as {CONTAINER_COST}. "
                "Split the request, or send text in place of token ids and escape sequences.",
                code="too_complex",
            )


def _cost_of_values(data: bytes, limit: int) -> int:
    """Return the cost of the values of a JSON text, or a number above the limit."""
    if b"\\" in data:
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    characters = np.frombuffer(data, np.uint8)  # NumPy releases the interpreter's lock
    cost, is_inside = 0, False
    for start in range(0, len(characters), BLOCK_BYTES):
        block = characters[start : start + BLOCK_BYTES]
        inside = np.bitwise_xor.accumulate(block == ord('"')) ^ is_inside
        is_inside = bool(inside[-1])
        outside = block[~inside]
        counts = np.bincount(outside, minlength=256)
        cost += sum(each * int(counts[sign[0]]) for sign, each in _COSTS.items())
        if cost > limit:
            break
    return cost


def check_keys(raw: Mapping[str, Any]) -> None:
    """Raise BadRequestError if an object that a model checks has too many keys.

    A model reports every unknown key, which takes microseconds each.
    """
    _check_size(raw, "the body")
    for name in ("logit_bias", "stream_options", "response_format"):
        _check_size(raw.get(name), name, 300)
    for name in ("messages", "tools"):
        for position, item in enumerate(_items(raw, name)):
            path = f"{name}[{position}]"
            _check_size(item, path)
            if isinstance(item, dict):
                _check_parts(item, path)


def _check_parts(item: Mapping[str, Any], path: str) -> None:
    _check_size(item.get("function"), f"{path}.function")
    for name in ("content", "tool_calls"):
        for part in _items(item, name):
            _check_size(part, f"{path}.{name}")
            if isinstance(part, dict):
                _check_size(part.get("function"), f"{path}.{name}.function")


def _items(raw: Mapping[str, Any], name: str) -> Sequence[Any]:
    """Return the items of a list. The model refuses longer lists by their length."""
    items = raw.get(name)
    return items if isinstance(items, list) and len(items) <= MAX_ITEMS else ()


def _check_size(value: Any, path: str, max_keys: int = MAX_KEYS) -> None:
    if isinstance(value, dict) and len(value) > max_keys:
        raise BadRequestError(
            f"{path} should have at most {max_keys} keys, found {len(value)}",
            None if path == "the body" else path,
        )


def shown(value: Any) -> str:
    """Return a wrong value as a short text, in time that does not depend on its size."""
    match value:
        case bool() | None:
            text = {True: "true", False: "false", None: "null"}[value]
        case int() if value.bit_length() > 128:
            text = f"an integer of {value.bit_length()} bits"
        case str():
            text = '"' + value[:MAX_SHOWN].encode("utf-8", "replace").decode() + '"'
        case dict():
            text = f"an object with {len(value)} keys"
        case list() | tuple():
            text = f"a list of {len(value)} items"
        case _:
            text = repr(value)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."
