"""What plugins build on changes only together with its version."""

from __future__ import annotations

import importlib.util
import json
import sys
import tomllib
from dataclasses import replace
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import pytest
from pydantic import BaseModel

from tokenspeed_core import __version__, api
from tokenspeed_core.api import DOTS
from tokenspeed_core.api.ops import common_ops
from tokenspeed_core.kernels.installed import installed_ops
from tokenspeed_core.plugins import Catalog, Selection
from tokenspeed_core.plugins.deprecations import DEPRECATED, Deprecation

pytestmark = pytest.mark.tree

DOCS = Path(__file__).parents[2] / "docs"
RECORDED: dict[str, Any] = json.loads((DOCS / "contract.json").read_text())


@pytest.fixture(scope="module")
def contract() -> ModuleType:
    """Return docs/make_contract.py, which is in no package."""
    spec = importlib.util.spec_from_file_location("make_contract", DOCS / "make_contract.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_contract"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("surface", RECORDED)
def test_no_public_signature_changed_without_its_version(
    contract: ModuleType, surface: str
) -> None:
    version, read = contract.surfaces()[surface]
    signatures = read()
    assert contract.misversioned(RECORDED[surface], version, signatures) == ""
    assert RECORDED[surface]["signatures"] == signatures, "run python docs/make_contract.py"
    assert RECORDED[surface]["version"] == version, "run python docs/make_contract.py"
    assert RECORDED[surface]["versions"][version] == contract.digest(signatures)


def test_every_surface_is_recorded(contract: ModuleType) -> None:
    assert set(contract.surfaces()) == set(RECORDED)
    assert len(RECORDED["tokenspeed_core.api"]["signatures"]) > 200


def test_every_name_that_a_stranger_may_import_is_recorded(contract: ModuleType) -> None:
    recorded = {name for surface in RECORDED.values() for name in surface["signatures"]}
    listed = {
        f"{module}.{name}"
        for module in (
            "tokenspeed_core",
            "tokenspeed_core.api",
            *contract.modules("tokenspeed_core.commands"),
            "tokenspeed_models.layers",
        )
        for name in import_module(module).__all__
        if not name.endswith("_API") and name != "API_VERSION"
    }
    kit = {
        f"{module}.{name}"
        for module in contract.modules("tokenspeed_testing")
        for name, value in vars(import_module(module)).items()
        if getattr(value, "__module__", "") == module and not name.startswith("_")
    }
    assert {"tokenspeed_core.LLM", "tokenspeed_core.commands.settings.configure"} <= listed
    assert {"tokenspeed_testing.cases.cells", "tokenspeed_testing.fake_model.NullRunner"} <= kit
    assert (listed | kit) - recorded == set()


def test_every_op_of_a_distribution_of_this_tree_is_recorded() -> None:
    recorded = {name for surface in RECORDED.values() for name in surface["signatures"]}
    ours = {
        tomllib.loads(path.read_text())["project"]["name"]
        for pattern in ("tokenspeed_*", "plugins/*")
        for path in DOCS.parent.glob(f"{pattern}/pyproject.toml")
    }
    catalog = Catalog.discover(Selection())
    entries = [entry for entry in catalog.entries("ops") if entry.distribution in ours]
    assert {entry.distribution for entry in entries} >= {
        "tokenspeed-kernels",
        "tokenspeed-kernels-blackwell",
    }
    ops = [op for entry in entries for op in catalog.need(entry, tuple)]
    assert {f"op {op.name}.signature" for op in ops} - recorded == set()


def test_fields_members_and_attributes_are_part_of_a_signature(contract: ModuleType) -> None:
    class Model(BaseModel):
        size: int
        name: str = ""

    class Shape(Protocol):
        dtype: str

    class Word(StrEnum):
        ONE = "one"

    fields = dict(contract.described("m.Model", Model))
    assert (fields["m.Model.size"], fields["m.Model.name"]) == ("int", "str = ...")
    assert dict(contract.described("m.Shape", Shape))["m.Shape.dtype"] == "str"
    assert dict(contract.described("m.Word", Word))["m.Word.ONE"] == "'one'"


BEFORE = {"m.f": "-> int", "m.f(x)": "x: int"}


@pytest.mark.parametrize(
    ("after", "version", "said"),
    [
        (BEFORE, "1.0", ""),
        ({**BEFORE, "m.g": "-> None"}, "1.0", "version 1.0 is another contract; raise it for: m.g"),
        ({**BEFORE, "m.g": "-> None"}, "1.1", ""),
        ({**BEFORE, "m.f(y)": "y: int = 1"}, "1.1", ""),
        ({**BEFORE, "m.f(y)": "y: int"}, "1.1", "a new major after 1.0: m.f(y)"),
        ({**BEFORE, "m.f(x)": "x: str"}, "1.1", "a new major after 1.0: m.f(x)"),
        ({"m.f": "-> int"}, "1.1", "a new major after 1.0: m.f(x)"),
        ({"m.f": "-> int"}, "2.0", ""),
    ],
)
def test_an_addition_asks_for_a_minor_and_a_break_for_a_major(
    contract: ModuleType, after: dict[str, str], version: str, said: str
) -> None:
    old = {"version": "1.0", "versions": {"1.0": contract.digest(BEFORE)}, "signatures": BEFORE}
    complaint = contract.misversioned(old, version, after)
    assert said in complaint
    assert bool(said) == bool(complaint)


@pytest.mark.parametrize(
    ("part", "value", "version", "said"),
    [
        ("relative", 1e-2, "1.1", "a new major after 1.0: op mine.relative tolerance of float32"),
        ("absolute", 0.0, "1.1", "a new major after 1.0: op mine.absolute tolerance of float32"),
        ("absolute", 0.0, "1.0", "raise it for: op mine.absolute tolerance of float32"),
        ("absolute", 0.0, "2.0", ""),
        ("relative", 5e-2, "1.0", "raise it for: op mine.relative tolerance of float32"),
        ("relative", 5e-2, "1.1", ""),
    ],
)
def test_a_tighter_tolerance_asks_for_a_major_and_a_wider_one_for_a_minor(
    contract: ModuleType, part: str, value: float, version: str, said: str
) -> None:
    (first, *_), op = DOTS, common_ops()["greedy"]
    told = replace(op, name="mine", tolerances=(replace(first, relative=2e-2, absolute=2e-2),))
    changed = replace(told, tolerances=(replace(told.tolerances[0], **{part: value}),))
    before, after = contract.contracts([told]), contract.contracts([changed])
    old = {"version": "1.0", "versions": {"1.0": contract.digest(before)}, "signatures": before}
    complaint = contract.misversioned(old, version, after)
    assert said in complaint
    assert bool(said) == bool(complaint)
    assert "new major" in contract.misversioned(
        old, "1.1", contract.contracts([replace(told, tolerances=())])
    )


def test_the_tolerances_of_every_op_of_this_tree_are_recorded() -> None:
    recorded = {name for surface in RECORDED.values() for name in surface["signatures"]}
    ops = installed_ops(Catalog.discover(Selection()))
    wanted = {
        f"op {op.name}.{part} tolerance of {each.dtype}"
        for op in ops.values()
        for each in op.tolerances
        for part in ("relative", "absolute")
    }
    assert len(wanted) > 100
    assert wanted - recorded == set()


def test_what_is_deprecated_is_recorded_and_in_its_two_minors(contract: ModuleType) -> None:
    recorded = RECORDED[contract.CORE]["deprecated"]
    assert (
        contract.untimely(recorded, contract.deprecations(), contract.offered(), __version__) == []
    )
    assert recorded == contract.deprecations(), "run python docs/make_contract.py"


ROWS = {"m.f": ["0.2", "0.4", "m.g"]}


@pytest.mark.parametrize(
    ("recorded", "rows", "there", "version", "said"),
    [
        ({}, ROWS, {"m.f"}, "0.2.0", ""),
        (ROWS, ROWS, {"m.f"}, "0.3.9", ""),
        (ROWS, {}, set(), "0.4.0", ""),
        (ROWS, ROWS, set(), "0.3.0", "m.f: is gone, and was to stay until 0.4; put it back"),
        (ROWS, {}, set(), "0.3.0", "m.f: was announced to go with 0.4; put its row back as it was"),
        (
            ROWS,
            {"m.f": ["0.3", "0.5", "m.g"]},
            {"m.f"},
            "0.3.0",
            "m.f: was announced to go with 0.4; put its row back",
        ),
        (
            ROWS,
            ROWS,
            {"m.f"},
            "0.4.0",
            "m.f: was to go with 0.4, and this is 0.4.0; remove it and its row",
        ),
        (
            {},
            {"m.f": ["0.2", "0.3", "m.g"]},
            {"m.f"},
            "0.2.0",
            "m.f: goes with 0.3, which is not two minors after 0.2",
        ),
        ({}, {"m.f": ["0.2", "0.4", ""]}, {"m.f"}, "0.2.0", "m.f: names nothing that replaces it"),
    ],
    ids=[
        "new",
        "old",
        "over",
        "gone too early",
        "row gone too early",
        "put off",
        "kept too long",
        "short",
        "bare",
    ],
)
def test_what_is_deprecated_neither_goes_too_early_nor_stays_too_long(
    contract: ModuleType, recorded: Any, rows: Any, there: set[str], version: str, said: str
) -> None:
    complaint = "\n".join(contract.untimely(recorded, rows, there, version))
    assert said in complaint
    assert bool(said) == bool(complaint)


def test_names_parameters_fields_hooks_contracts_and_flags_can_be_deprecated(
    contract: ModuleType,
) -> None:
    assert contract.offered() >= {
        "tokenspeed_core.api.View",
        "tokenspeed_core.api.BuildContext.attention(group)",
        "hook observe_step(record)",
        "tokenspeed_core.api.KernelSpec.obtain",
        "kind policies [api1]",
        "flag --seed",
    }


def test_a_deprecated_name_stays_in_the_contract(
    contract: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        DEPRECATED,
        "tokenspeed_core.api.Glance",
        Deprecation("0.2", "0.4", "tokenspeed_core.api.View"),
    )
    monkeypatch.setattr(api, "_Glance", api.View, raising=False)
    monkeypatch.setattr(api, "__all__", [*api.__all__, "Glance"])
    with pytest.warns(FutureWarning, match="Glance"):
        assert "tokenspeed_core.api.Glance.num_query" in contract.offered()
