"""What passes between processes comes out as it went in, and whatever else arrives is a WireError and no more."""

from __future__ import annotations

import ast
import dataclasses
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

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
    to_api,
    to_engine,
)
from tokenspeed_core.engine.wire import Codec, WireError, pack

steps = Codec(StepPlan, LateInputs, StepResult)
KINDS: dict[type[Any], Codec] = {
    **dict.fromkeys((Submit, Abort, Drain), to_engine),
    **dict.fromkeys((Outputs, Rejected, Heartbeat, Ready, Failed), to_api),
    **dict.fromkeys((StepPlan, LateInputs, StepResult), steps),
}
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
few = settings(max_examples=25)  # for each kind of message
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


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for values of an annotation that the wire knows."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is np.ndarray:
        dtype = np.dtype(typing.get_args(args[1])[0])
        return st.lists(ELEMENTS[dtype.name], max_size=5).map(
            lambda items: np.asarray(items, dtype)
        )
    if origin is types.UnionType:
        return st.one_of(*(st.none() if arg is type(None) else values(arg) for arg in args))
    if origin is tuple:
        return st.lists(values(args[0]), max_size=3).map(tuple)
    return messages(hint) if dataclasses.is_dataclass(hint) else SCALARS[hint]


def messages(kind: Any) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(kind)
    return st.builds(
        kind, **{each.name: values(hints[each.name]) for each in dataclasses.fields(kind)}
    )


def plain(value: Any) -> Any:
    """Return a message as something that `==` compares by content, types included."""
    if isinstance(value, np.ndarray):
        return (value.dtype.name, value.tolist())
    if isinstance(value, tuple):
        return tuple(plain(item) for item in value)
    if dataclasses.is_dataclass(value):
        return (
            type(value),
            [plain(getattr(value, each.name)) for each in dataclasses.fields(value)],
        )
    return (type(value), value)


def refused_or_known(codec: Codec, data: bytes) -> None:
    """Decode; anything but a message or a WireError fails the test."""
    try:
        message = codec.unpack(data)
    except WireError:
        return
    assert type(message) in KINDS


@every_kind
@few
@given(data=st.data())
def test_a_message_comes_out_as_it_went_in(kind: type[Any], data: st.DataObject) -> None:
    message = data.draw(messages(kind))
    assert plain(KINDS[kind].unpack(pack(message))) == plain(message)


def test_every_message_has_a_tag_of_its_own() -> None:
    assert len({kind.tag for kind in KINDS}) == len(KINDS)


@given(messages(Submit))
def test_a_message_of_another_protocol_is_refused(message: Submit) -> None:
    with pytest.raises(WireError, match=r"unknown message 'submit'"):
        to_api.unpack(pack(message))


@every_kind
@few
@given(data=st.data(), surplus=st.integers(-2, 2).filter(bool))
def test_a_field_too_many_or_too_few_is_refused(
    kind: type[Any], data: st.DataObject, surplus: int
) -> None:
    fields = decoded(pack(data.draw(messages(kind))))
    if surplus < -len(fields) + 1:
        return
    changed = [*fields, *[None] * surplus] if surplus > 0 else fields[:surplus]
    with pytest.raises(WireError, match=f"{kind.__name__} takes {len(fields) - 1} fields"):
        KINDS[kind].unpack(encoded(changed))


@every_kind
@few
@given(data=st.data())
def test_a_field_of_another_type_is_refused_by_name(kind: type[Any], data: st.DataObject) -> None:
    names = [each.name for each in dataclasses.fields(kind)]
    if not names:
        return
    fields = decoded(pack(data.draw(messages(kind))))
    index = data.draw(st.integers(0, len(names) - 1))
    fields[index + 1] = {"a": "map"}
    with pytest.raises(WireError, match=f"{kind.__name__}.{names[index]}: expected|takes"):
        KINDS[kind].unpack(encoded(fields))


@pytest.mark.parametrize(
    ("hint", "wrong"),
    [
        ("request_id", True),
        ("request_id", 1.0),
        ("request_id", None),
        ("temperature", "0"),
        ("cache_salt", b"salt"),
        ("prompt", [1, 2]),
        ("prompt", msgpack.ExtType(2, bytes(8))),
        ("prompt", bytes(8)),
        ("seed", 0.5),
    ],
)
def test_nothing_is_converted_but_an_integer_to_a_float(hint: str, wrong: object) -> None:
    names = [each.name for each in dataclasses.fields(Submit)]
    submit = Submit(
        1,
        np.asarray([1, 2], np.int32),
        1,
        1,
        1.0,
        0,
        1.0,
        0.0,
        0.0,
        0.0,
        1.0,
        None,
        -1,
        np.zeros(0, np.int32),
        np.zeros(0, np.float32),
        np.zeros(0, np.int32),
        0,
        "",
    )
    fields = decoded(pack(submit))
    fields[names.index("temperature") + 1] = 1
    assert type(to_engine.unpack(encoded(fields)).temperature) is float
    fields[names.index(hint) + 1] = wrong
    with pytest.raises(WireError, match=f"Submit.{hint}: expected"):
        to_engine.unpack(encoded(fields))


@pytest.mark.parametrize(
    ("code", "data"), [(0, bytes(7)), (1, bytes(4)), (6, bytes(4)), (127, b""), (-2, bytes(4))]
)
def test_a_column_that_is_cut_or_of_an_unknown_kind_is_refused(code: int, data: bytes) -> None:
    head = b"\x92\xa5abort" + b"\xc7" + bytes([len(data), code % 256]) + data
    with pytest.raises(
        WireError, match=rf"unknown or cut column \(code {code}, {len(data)} bytes\)"
    ):
        to_engine.unpack(head)


def test_a_column_of_booleans_holds_nothing_else() -> None:
    flags = Codec(Flags)
    assert flags.unpack(encoded(["flags", msgpack.ExtType(3, b"\0\1")])).flags.tolist() == [
        False,
        True,
    ]
    with pytest.raises(WireError, match="booleans"):
        flags.unpack(encoded(["flags", msgpack.ExtType(3, b"\2")]))


@dataclasses.dataclass(frozen=True, eq=False)
class Flags:
    """A message of this test."""

    tag: typing.ClassVar[str] = "flags"

    flags: np.ndarray[Any, np.dtype[np.bool_]]


@pytest.mark.parametrize(
    "wrong",
    [
        np.zeros((2, 2), np.bool_),
        np.zeros(2, np.float64),
        np.zeros(2, ">i4"),
        np.zeros(2, object),
        {1, 2},
        object(),
    ],
)
def test_what_the_wire_does_not_carry_cannot_be_sent(wrong: Any) -> None:
    with pytest.raises(TypeError, match="cannot send"):
        pack(Flags(wrong))


def test_a_column_need_not_lie_in_one_piece() -> None:
    flags = Codec(Flags)
    column = np.asarray([True, False, False, True])[::3]
    assert flags.unpack(pack(Flags(column))).flags.tolist() == [True, True]


def test_a_received_column_cannot_be_written() -> None:
    message = to_engine.unpack(pack(Abort(np.asarray([1], np.int64))))
    assert not message.sequence_ids.flags.writeable


# -- anything at all ------------------------------------------------------------------------------

leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(max_size=8),
    st.binary(max_size=8),
    st.builds(msgpack.ExtType, st.integers(0, 8), st.binary(max_size=16)),
    st.sampled_from([kind.tag for kind in KINDS]),
)
trees = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(), inner, max_size=3),
)
codecs = st.sampled_from([to_engine, to_api, steps])


@given(codecs, st.binary(max_size=200))
@example(to_engine, b"")
@example(to_engine, b"\x91\x90")  # the tag is a list
@example(to_engine, b"\x81\x90\x01")  # the key of a map is a list
@example(to_engine, b"\x91" * 500 + b"\xc0")  # deep
@example(to_engine, b"\x91" * 100_000 + b"\xc0")  # too deep
@example(to_engine, b"\xdd\xff\xff\xff\xff")  # a list of four thousand million
@example(to_engine, b"\x91\xa2\xff\xfe")  # no UTF-8
@example(to_engine, b"\x91\xc7\x05\xff12345")  # no time stamp
@example(to_engine, b"\xa5drain")  # a tag without its list
@example(to_engine, b"\x91\xa5drain\xc0")  # a message and a byte
def test_no_bytes_raise_anything_but_a_wire_error(codec: Codec, data: bytes) -> None:
    refused_or_known(codec, data)


@given(codecs, trees)
def test_no_values_raise_anything_but_a_wire_error(codec: Codec, tree: Any) -> None:
    refused_or_known(codec, encoded(tree))


@given(codecs, st.sampled_from(list(KINDS)), st.lists(trees, max_size=20))
def test_no_fields_behind_a_good_tag_raise_anything_but_a_wire_error(
    codec: Codec,
    kind: type[Any],
    fields: list[Any],
) -> None:
    num = len(dataclasses.fields(kind))
    refused_or_known(codec, encoded([kind.tag, *fields]))
    refused_or_known(codec, encoded([kind.tag, *(fields + [None] * num)[:num]]))


@every_kind
@few
@given(data=st.data())
def test_no_damage_to_a_message_raises_anything_but_a_wire_error(
    kind: type[Any], data: st.DataObject
) -> None:
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
    refused_or_known(KINDS[kind], bytes(packed))


def decoded(data: bytes) -> list[Any]:
    """Return a packed message as `[tag, field, ...]`, columns as msgpack's extensions."""
    fields = msgpack.unpackb(data, ext_hook=msgpack.ExtType, strict_map_key=False)
    assert isinstance(fields, list)
    return fields


def encoded(value: Any) -> bytes:
    data = msgpack.packb(value)
    assert isinstance(data, bytes)
    return data


# -- nothing is unpickled -------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]
SOURCES = [
    path
    for folder in (
        "tokenspeed_core",
        "tokenspeed_kernels",
        "tokenspeed_models",
        "plugins",
        "benchmarks",
    )
    for path in sorted((ROOT / folder).rglob("*.py"))
    if not {"tests", "build", "dist"} & set(path.relative_to(ROOT).parts)
]
FORBIDDEN = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}


def breaches(tree: ast.Module) -> list[str]:
    """Return what a module does that could run code from a file or a message."""
    return [text for node in ast.walk(tree) if (text := breach(node))]


def breach(node: ast.AST) -> str | None:
    if isinstance(node, ast.Import):
        # The name of its error may be caught: `import pickle` alone unpickles nothing.
        found = {alias.name.split(".")[0] for alias in node.names} & FORBIDDEN - {"pickle"}
        return f"imports {found.pop()}" if found else None
    if isinstance(node, ast.ImportFrom):
        names = {alias.name for alias in node.names}
        banned = (
            node.module is not None
            and node.module.split(".")[0] in FORBIDDEN
            and names != {"UnpicklingError"}
        )
        return f"imports {sorted(names)} from {node.module}" if banned else None
    if (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "pickle"
    ):
        return None if node.attr == "UnpicklingError" else f"uses pickle.{node.attr}"
    return called(node) if isinstance(node, ast.Call) else None


def called(node: ast.Call) -> str | None:
    name, keywords = (
        ast.unparse(node.func),
        {each.arg: ast.unparse(each.value) for each in node.keywords},
    )
    if name in ("eval", "exec", "__import__", "yaml.load", "yaml.unsafe_load"):
        return f"calls {name}"
    if name.endswith("torch.load") and keywords.get("weights_only") != "True":
        return "calls torch.load without weights_only=True"
    if keywords.get("allow_pickle", "False") != "False":
        return f"calls {name} with allow_pickle"
    return None


@pytest.mark.tree
def test_no_package_of_ours_can_run_code_from_a_file_or_a_message() -> None:
    assert len(SOURCES) > 100
    found = {str(path.relative_to(ROOT)): breaches(ast.parse(path.read_text())) for path in SOURCES}
    assert {path: each for path, each in found.items() if each} == {}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import pickle\npickle.loads(b'')", ["uses pickle.loads"]),
        ("from pickle import loads", ["imports ['loads'] from pickle"]),
        ("import marshal", ["imports marshal"]),
        ("import os, dill", ["imports dill"]),
        ("eval('1')", ["calls eval"]),
        ("exec('1')", ["calls exec"]),
        ("torch.load(f)", ["calls torch.load without weights_only=True"]),
        ("torch.load(f, weights_only=False)", ["calls torch.load without weights_only=True"]),
        ("np.load(f, allow_pickle=True)", ["calls np.load with allow_pickle"]),
        (
            "import pickle\ntry: torch.load(f, weights_only=True)\nexcept pickle.UnpicklingError: model.eval()",
            [],
        ),
    ],
)
def test_the_ban_finds_what_it_forbids(source: str, expected: list[str]) -> None:
    assert breaches(ast.parse(source)) == expected
