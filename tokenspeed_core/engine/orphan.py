"""A child that must not outlive its parent, however the parent ends."""

from __future__ import annotations

import ctypes
import sys
from signal import Signals

_PR_SET_PDEATHSIG = 1


def end_with_parent(by: Signals) -> None:
    """Have the kernel send this process `by` when its parent ends. Without effect where the system is not Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, by)
