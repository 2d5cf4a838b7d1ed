"""Enable Triton's interpreter before any kernel is imported. Other tests must run in another process."""

from __future__ import annotations

import os

import pytest

os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def _interpreted() -> None:
    import triton

    assert triton.knobs.runtime.interpret, "a kernel was imported before TRITON_INTERPRET was set"
