"""The factory of the backend `fa3`. Importing it loads the library, so that selection rejects one that does not load."""

from __future__ import annotations

from importlib import import_module

from tokenspeed_kernels_hopper.fa3 import LIBRARY, attention

__all__ = ["attention"]

import_module(LIBRARY)
