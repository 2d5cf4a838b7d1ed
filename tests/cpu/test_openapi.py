"""The description that the server gives of its routes is that of the code."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

pytestmark = pytest.mark.tree

MAKER = Path(__file__).parents[2] / "tools" / "docs" / "make_openapi.py"


def test_the_description_of_the_routes_is_current() -> None:
    spec = importlib.util.spec_from_file_location("make_openapi", MAKER)
    assert spec is not None
    assert spec.loader is not None
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    assert maker.PATH.read_text(encoding="utf-8") == maker.text(), (
        "run python tools/docs/make_openapi.py"
    )
