"""Turns Triton's interpreter on before any kernel is imported; other tests must not share the process."""

from __future__ import annotations

import os

import pytest

os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def _interpreted() -> None:
    import triton

    assert triton.knobs.runtime.interpret, "a kernel was imported before TRITON_INTERPRET was set"
