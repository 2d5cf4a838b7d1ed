"""Reads the values of settings, including the spellings of other engines."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any

from pydantic import BeforeValidator

_DTYPES = {
    "half": "float16",
    "fp16": "float16",
    "bf16": "bfloat16",
    "float": "float32",
    "fp32": "float32",
}
_CACHE_DTYPES = {"fp8": "fp8_e4m3"}
_FACTORS = {"k": 10**3, "m": 10**6, "K": 2**10, "M": 2**20}


def _dtype(value: Any) -> Any:
    return _DTYPES.get(value, value) if isinstance(value, str) else value


def _cache_dtype(value: Any) -> Any:
    return _CACHE_DTYPES.get(value, value) if isinstance(value, str) else value


def _count(value: Any) -> Any:
    """Read "32k" as 32000 and "32K" as 32768, as vLLM does. Raises ValueError for a fraction."""
    found = (
        re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([kmKM])", value) if isinstance(value, str) else None
    )
    if found is None:
        return value
    count = float(found[1]) * _FACTORS[found[2]]
    if not count.is_integer():
        raise ValueError("must be a whole number")
    return int(count)


def json_value(value: Any) -> Any:
    """Read a text as JSON."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"must be JSON: {error}") from error


def split_names(value: Any) -> Any:
    """Read `a,b` or the JSON `["a", "b"]` as a list."""
    if not isinstance(value, str):
        return value
    if not value.startswith("["):
        return [name.strip() for name in value.split(",") if name.strip()]
    try:
        return json.loads(value)
    except ValueError as error:
        raise ValueError(f"must be names separated by commas, or a JSON list: {error}") from error


def split_numbers(value: Any) -> Any:
    """Read `1,2,4`, `[1, 2, 4]` or one number as a list."""
    if isinstance(value, str):
        return [item.strip() for item in value.strip("[] ").split(",")]
    return [value] if isinstance(value, int) and not isinstance(value, bool) else value


DtypeName = BeforeValidator(_dtype)
CacheDtypeName = BeforeValidator(_cache_dtype)
TokenCount = Annotated[int, BeforeValidator(_count)]
OptionalTokenCount = Annotated[int | None, BeforeValidator(_count)]
"""A number of tokens, also as 32k (32000) or 32K (32768)."""
