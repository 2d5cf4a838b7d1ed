"""What plugins build on changes only together with its version."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

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
def test_no_public_signature_changed_without_its_version(contract: ModuleType, surface: str) -> None:
    version, read = contract.surfaces()[surface]
    signatures = read()
    assert contract.misversioned(RECORDED[surface], version, signatures) == ""
    assert RECORDED[surface]["signatures"] == signatures, "run python docs/make_contract.py"
    assert RECORDED[surface]["version"] == version, "run python docs/make_contract.py"
    assert RECORDED[surface]["versions"][version] == contract.digest(signatures)


def test_every_surface_is_recorded(contract: ModuleType) -> None:
    assert set(contract.surfaces()) == set(RECORDED)
    assert len(RECORDED["tokenspeed_core.api"]["signatures"]) > 200


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
