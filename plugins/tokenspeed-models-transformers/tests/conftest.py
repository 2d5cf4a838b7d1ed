"""Makes the helpers of these tests importable, and keeps transformers quiet."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))


@pytest.fixture(scope="session", autouse=True)
def quiet() -> None:
    # The process that starts the workers of pytest-xdist need not import this.
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
