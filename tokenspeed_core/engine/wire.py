"""The encoding of messages between processes: msgpack, checked against a schema on arrival.

Each `Message` is sent as a msgpack array `[tag, field, ...]`. NumPy columns are msgpack
extensions, so 256 rows cost one copy per column. Nothing is ever unpickled.
"""

from __future__ import annotations

from typing import Any, Union

import msgspec
import numpy as np
from msgspec.msgpack import Decoder, Encoder, Ext

from tokenspeed_core.errors import TokenSpeedError

# The extension code of a column is the position of its dtype.
_DTYPES: tuple[np.dtype[Any], ...] = tuple(
    np.dtype(name) for name in ("int32", "int64", "float32", "bool", "uint8", "uint64")
)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}


class WireError(TokenSpeedError, ValueError):
    """Received bytes that are not a message of the expected kinds."""


class Message(msgspec.Struct, frozen=True, eq=False, array_like=True, forbid_unknown_fields=True):
    """A message between processes. Each subclass sets its own `tag`."""


class Codec:
    """Decodes the messages of one protocol."""

    def __init__(self, *kinds: type[Any]) -> None:
        """Accept `Message` subclasses, or one dataclass."""
        self._decoder: Decoder[Any] = Decoder(
            Union[kinds],  # noqa: UP007 (a union of a tuple)
            dec_hook=_check_column,
            ext_hook=_read_column,
        )

    def unpack(self, data: bytes) -> Any:
        """Decode one message. Raises WireError if the bytes do not fit a known schema."""
        try:
            return self._decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, WireError) as error:
            raise WireError(f"cannot read message: {error}") from error


def _write_column(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        code = _CODES.get(value.dtype)
        if code is None or value.ndim != 1:
            raise TypeError(f"cannot send an array of {value.ndim} axes of {value.dtype}")
        return Ext(code, value.tobytes())
    if isinstance(value, np.integer):
        return int(value)
    raise TypeError(f"cannot send a {type(value).__name__}")


def _read_column(code: int, data: memoryview) -> np.ndarray[Any, Any]:
    if not 0 <= code < len(_DTYPES) or len(data) % _DTYPES[code].itemsize:
        raise WireError(f"truncated column or unknown type (code {code}, {len(data)} bytes)")
    # A copy is aligned, and does not keep the whole message alive.
    column = np.frombuffer(bytes(data), _DTYPES[code])
    if column.dtype == np.bool_ and column.view(np.uint8).max(initial=0) > 1:
        raise WireError("a boolean column has a byte other than 0 and 1")
    return column


def _check_column(kind: Any, value: Any) -> Any:
    """Return the value of an array field, checked. `kind` is `np.ndarray[Any, np.dtype[SCALAR]]`."""
    # Plain attributes: typing.get_args would take most of the time of reading a message.
    scalar = kind.__args__[1].__args__[0]
    if not isinstance(value, np.ndarray) or value.dtype.type is not scalar:
        found = value.dtype if isinstance(value, np.ndarray) else type(value).__name__
        raise TypeError(f"expected a column of {scalar.__name__}, found {found}")
    return value


_encoder = Encoder(enc_hook=_write_column)


def pack(message: Any) -> bytes:
    """Encode a message. Raises TypeError for a value that has no encoding."""
    return _encoder.encode(message)
