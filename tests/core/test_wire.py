"""Messages survive the wire, and any other bytes raise WireError."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.msgpack import Ext

from tokenspeed_core.api.step import LateInputs, StepPlan, StepResult
from tokenspeed_core.engine.messages import (
    Abort,
    Drain,
    Failed,
    Heartbeat,
    Outputs,
    Ready,
    Rejected,
    Submit,
    WorkerReady,
    to_api,
    to_engine,
)
from tokenspeed_core.engine.wire import Codec, Message, WireError, pack

MESSAGES: dict[type[Any], Codec] = {
    **dict.fromkeys((Submit, Abort, Drain, WorkerReady), to_engine),
    **dict.fromkeys((Outputs, Rejected, Heartbeat, Ready, Failed), to_api),
}
# The records of a step are dataclasses, each with its own codec.
KINDS = {**MESSAGES, **{kind: Codec(kind) for kind in (StepPlan, LateInputs, StepResult)}}
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
every_message = pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
few = settings(max_examples=10)  # for each kind
SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
    str: st.text(max_size=20),
}
ELEMENTS: dict[str, st.SearchStrategy[Any]] = {
    "int32": st.integers(-(2**31), 2**31 - 1),
    "int64": st.integers(-(2**63), 2**63 - 1),
    "float32": st.floats(width=32, allow_nan=False),
    "bool": st.booleans(),
}


class Flags(Message, frozen=True, tag="flags"):
    """A message of these tests."""

    flags: np.ndarray[Any, np.dtype[np.bool_]]


def names(kind: Any) -> tuple[str, ...]:
    if dataclasses.is_dataclass(kind):
        return tuple(each.name for each in dataclasses.fields(kind))
    return tuple(kind.__struct_fields__)


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for values of an annotation that the wire supports."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is np.ndarray:
        dtype = np.dtype(typing.get_args(args[1])[0])
        return st.lists(ELEMENTS[dtype.name], max_size=5).map(
            lambda items: np.asarray(items, dtype)
        )
    if origin is types.UnionType:
        return st.one_of(*(st.none() if arg is type(None) else values(arg) for arg in args))
    if origin is typing.Literal:
        return st.sampled_from(args)
    if origin is tuple:
        return st.lists(values(args[0]), max_size=3).map(tuple)
    return SCALARS[hint] if hint in SCALARS else messages(hint)


def messages(kind: Any) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(kind)
    return st.builds(kind, **{name: values(hints[name]) for name in names(kind)})


def plain(value: Any) -> Any:
    """Return a message as something that `==` compares by content, types included."""
    if isinstance(value, np.ndarray):
        return (value.dtype.name, value.tolist())
    if isinstance(value, tuple):
        return tuple(plain(item) for item in value)
    if dataclasses.is_dataclass(value) or isinstance(value, msgspec.Struct):
        return (type(value), [plain(getattr(value, name)) for name in names(type(value))])
    return (type(value), value)


def check_unpack(codec: Codec, data: bytes) -> None:
    """Fail the test if decoding gives anything but a message or a WireError."""
    try:
        message = codec.unpack(data)
    except WireError:
        return
    assert type(message) in KINDS


def decoded(data: bytes) -> list[Any]:
    """Return a packed message as `[tag, field, ...]`, columns as extensions."""
    fields = msgspec.msgpack.decode(data)
    assert isinstance(fields, list)
    return fields


encoded = msgspec.msgpack.encode


@every_kind
@few
@given(data=st.data())
def test_message_survives_round_trip(kind: type[Any], data: st.DataObject) -> None:
    message = data.draw(messages(kind))
    assert plain(KINDS[kind].unpack(pack(message))) == plain(message)


@given(messages(Submit))
def test_message_of_another_protocol_is_refused(message: Submit) -> None:
    with pytest.raises(WireError, match="submit"):
        to_api.unpack(pack(message))


@every_message
@few
@given(data=st.data(), surplus=st.integers(-2, 2).filter(bool))
def test_extra_and_missing_fields_are_refused(
    kind: type[Any], data: st.DataObject, surplus: int
) -> None:
    fields = decoded(pack(data.draw(messages(kind))))
    num_required = len(fields) - len(kind.__struct_defaults__)
    if surplus < 0 and not 1 <= len(fields) + surplus < num_required:
        return
    changed = [*fields, *[None] * surplus] if surplus > 0 else fields[:surplus]
    with pytest.raises(WireError):
        KINDS[kind].unpack(encoded(changed))


@every_message
@few
@given(data=st.data())
def test_field_of_another_type_is_refused(kind: type[Any], data: st.DataObject) -> None:
    fields = decoded(pack(data.draw(messages(kind))))
    if len(fields) == 1:
        return
    fields[data.draw(st.integers(1, len(fields) - 1))] = {"a": "map"}
    with pytest.raises(WireError):
        KINDS[kind].unpack(encoded(fields))


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("request_id", True),
        ("request_id", 1.0),
        ("request_id", None),
        ("temperature", "0"),
        ("cache_salt", b"salt"),
        ("prompt", [1, 2]),
        ("prompt", Ext(2, bytes(8))),
        ("prompt", bytes(8)),
        ("seed", 0.5),
    ],
)
@settings(max_examples=1)
@given(submit=messages(Submit))
def test_only_integers_convert_to_floats(submit: Submit, name: str, wrong: object) -> None:
    fields = decoded(pack(submit))
    fields[names(Submit).index("temperature") + 1] = 1
    assert type(to_engine.unpack(encoded(fields)).temperature) is float
    index = names(Submit).index(name) + 1
    fields[index] = wrong
    with pytest.raises(WireError, match=rf"\[{index}\]"):
        to_engine.unpack(encoded(fields))


@pytest.mark.parametrize(
    ("code", "data"), [(0, bytes(7)), (1, bytes(4)), (6, bytes(4)), (127, b""), (-2, bytes(4))]
)
def test_truncated_or_unknown_column_is_refused(code: int, data: bytes) -> None:
    message = b"\x92\xa5abort" + b"\xc7" + bytes([len(data), code % 256]) + data
    with pytest.raises(WireError, match=rf"code {code}, {len(data)} bytes"):
        to_engine.unpack(message)


def test_boolean_column_holds_only_booleans() -> None:
    codec = Codec(Flags)
    flags = codec.unpack(encoded(["flags", Ext(3, b"\0\1")])).flags
    assert flags.tolist() == [False, True]
    with pytest.raises(WireError, match="boolean"):
        codec.unpack(encoded(["flags", Ext(3, b"\2")]))


@pytest.mark.parametrize(
    "wrong",
    [
        np.zeros((2, 2), np.bool_),
        np.zeros(2, np.float64),
        np.zeros(2, ">i4"),
        np.zeros(2, object),
        object(),
    ],
)
def test_unsupported_value_cannot_be_sent(wrong: Any) -> None:
    with pytest.raises(TypeError, match="cannot send"):
        pack(Flags(wrong))


def test_strided_column_can_be_sent() -> None:
    column = np.asarray([True, False, False, True])[::3]
    assert Codec(Flags).unpack(pack(Flags(column))).flags.tolist() == [True, True]


def test_received_column_is_read_only() -> None:
    message = to_engine.unpack(pack(Abort(np.asarray([1], np.int64))))
    assert not message.sequence_ids.flags.writeable


# -- arbitrary bytes ------------------------------------------------------------------------------

leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(max_size=8),
    st.binary(max_size=8),
    st.builds(Ext, st.integers(0, 8), st.binary(max_size=16)),
    st.sampled_from([kind.__struct_config__.tag for kind in MESSAGES]),
)
trees = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(), inner, max_size=3),
)
codecs = st.sampled_from(list(KINDS.values()))


@given(codecs, st.binary(max_size=200))
@example(to_engine, b"")
@example(to_engine, b"\x91\x90")  # the tag is a list
@example(to_engine, b"\x81\x90\x01")  # a map with a list as its key
@example(to_engine, b"\x91" * 500 + b"\xc0")  # deep
@example(to_engine, b"\x92\xa5abort" + b"\x91" * 100_000 + b"\xc0")  # too deep
@example(to_engine, b"\xdd\xff\xff\xff\xff")  # a list of 2**32 - 1
@example(to_engine, b"\x92\xa5abort\xdd\xff\xff\xff\xff")
@example(to_engine, b"\x91\xa2\xff\xfe")  # not UTF-8
@example(to_engine, b"\x91\xc7\x05\xff12345")  # a bad time stamp
@example(to_engine, b"\x92\xa5abort\xc7\x05\xff12345")
@example(to_engine, b"\xa5drain")  # a tag without its list
@example(to_engine, b"\x91\xa5drain\xc0")  # a message and a byte
def test_arbitrary_bytes_raise_wire_error(codec: Codec, data: bytes) -> None:
    check_unpack(codec, data)


@given(codecs, trees)
def test_arbitrary_values_raise_wire_error(codec: Codec, tree: Any) -> None:
    check_unpack(codec, encoded(tree))


@given(st.sampled_from(list(MESSAGES)), st.lists(trees, max_size=20))
def test_arbitrary_fields_raise_wire_error(kind: type[Any], fields: list[Any]) -> None:
    num_fields = len(names(kind))
    tag = kind.__struct_config__.tag
    check_unpack(MESSAGES[kind], encoded([tag, *fields]))
    check_unpack(MESSAGES[kind], encoded([tag, *(fields + [None] * num_fields)[:num_fields]]))


@every_kind
@few
@given(data=st.data())
def test_damaged_message_raises_wire_error(kind: type[Any], data: st.DataObject) -> None:
    packed = bytearray(pack(data.draw(messages(kind))))
    at = data.draw(st.integers(0, len(packed) - 1))
    damage: Callable[[], None] = data.draw(
        st.sampled_from(
            [
                lambda: packed.__delitem__(slice(at, None)),
                lambda: packed.__delitem__(at),
                lambda: packed.__setitem__(at, data.draw(st.integers(0, 255))),
                lambda: packed.insert(at, data.draw(st.integers(0, 255))),
            ]
        )
    )
    damage()
    check_unpack(KINDS[kind], bytes(packed))
