"""The one codec for all that passes between processes: msgpack with a schema, nothing ever unpickled.

A message is a frozen dataclass with a `tag`. It travels as `[tag, field, field, ...]`; NumPy columns
travel as msgpack extensions, so that 256 rows cost one copy and not 256 objects.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any

import msgpack
import numpy as np

from tokenspeed_core.errors import TokenSpeedError

_DTYPES: tuple[np.dtype[Any], ...] = tuple(
    np.dtype(name) for name in ("int32", "int64", "float32", "bool", "uint8", "uint64")
)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
_EMPTY = [msgpack.ExtType(code, b"") for code in _CODES.values()]


class WireError(TokenSpeedError, ValueError):
    """Bytes that are no message of the expected kinds."""


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        code = _CODES.get(value.dtype)
        if code is None or value.ndim != 1:
            raise TypeError(f"cannot send an array of {value.ndim} axes of {value.dtype}")
        return msgpack.ExtType(code, value.tobytes()) if value.size else _EMPTY[code]
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, np.integer):
        return int(value)
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    raise TypeError(f"cannot send a {type(value).__name__}")


def _decode_ext(code: int, data: bytes) -> np.ndarray[Any, Any]:
    if not 0 <= code < len(_DTYPES) or len(data) % _DTYPES[code].itemsize:
        raise WireError(f"unknown or cut column (code {code}, {len(data)} bytes)")
    column = np.frombuffer(data, dtype=_DTYPES[code])
    if column.dtype == np.bool_ and column.view(np.uint8).max(initial=0) > 1:
        raise WireError("a column of booleans holds something else")
    return column


def pack(message: Any) -> bytes:
    """Encode a message (or one nested in it). Raises TypeError for what the wire does not carry."""
    fields = [getattr(message, field.name) for field in dataclasses.fields(message)]
    data = msgpack.packb([message.tag, *fields], default=_encode, strict_types=True)
    assert isinstance(data, bytes)
    return data


class Codec:
    """Decodes the messages of one protocol; whatever is not in it is refused."""

    def __init__(self, *kinds: type[Any]) -> None:
        self._builders = {kind.tag: _Builder(kind) for kind in kinds}

    def unpack(self, data: bytes) -> Any:
        """Decode one message. Raises WireError on anything that does not fit a known schema."""
        try:
            value = msgpack.unpackb(data, ext_hook=_decode_ext, strict_map_key=False)
        except WireError:
            raise
        except (
            TypeError,
            ValueError,
            msgpack.UnpackException,
        ) as error:  # TypeError: a map whose key is a list
            raise WireError(f"not msgpack: {error}") from error
        tag = value[0] if isinstance(value, list) and value else None
        builder = self._builders.get(tag) if isinstance(tag, str) else None
        if builder is None:
            what = repr(tag[:40]) if isinstance(tag, str) else "without a tag"
            raise WireError(f"unknown message {what}; known: {', '.join(sorted(self._builders))}")
        return builder(value[1:])


class _Builder:
    """Builds one dataclass from a list of fields, checking each against its annotation."""

    def __init__(self, kind: type[Any]) -> None:
        self.kind = kind
        hints = typing.get_type_hints(kind)
        self.fields = [(f.name, _checker(hints[f.name])) for f in dataclasses.fields(kind)]

    def __call__(self, values: Any) -> Any:
        if not isinstance(values, list) or len(values) != len(self.fields):
            raise WireError(f"{self.kind.__name__} takes {len(self.fields)} fields")
        built = {}
        for (name, check), value in zip(self.fields, values, strict=True):
            try:
                built[name] = check(value)
            except (TypeError, ValueError) as error:
                raise WireError(f"{self.kind.__name__}.{name}: {error}") from error
        return self.kind(**built)


def _checker(hint: Any) -> Any:
    """A function that returns a decoded value of the annotated type or raises."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is np.ndarray:
        dtype = np.dtype(typing.get_args(args[1])[0])
        return lambda value: _column(value, dtype)
    if origin in (types.UnionType, typing.Union):
        inner = [_checker(arg) for arg in args if arg is not type(None)]
        assert len(inner) == 1, "a wire field is one type or None"
        return lambda value: None if value is None else inner[0](value)
    if origin is tuple:
        each = _checker(args[0])
        return lambda value: tuple(map(each, _scalar(value, list)))
    if dataclasses.is_dataclass(hint):
        return _Builder(typing.cast(type[Any], hint))
    return lambda value: _scalar(value, hint)


def _column(value: Any, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    if not isinstance(value, np.ndarray) or value.dtype != dtype:
        raise TypeError(
            f"expected a column of {dtype}, found {getattr(value, 'dtype', type(value).__name__)}"
        )
    return value


def _scalar(value: Any, kind: type[Any]) -> Any:
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, found {type(value).__name__}")
    return value
