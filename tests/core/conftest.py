"""Lets the tests of this folder import their helpers, which stand beside them, and take their time."""

from __future__ import annotations

import sys
from pathlib import Path

from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

settings.register_profile("shared machine", deadline=None)  # how long an example takes says little about it
settings.load_profile("shared machine")
