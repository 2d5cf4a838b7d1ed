"""Ends a subprocess when its parent ends for any reason."""

from __future__ import annotations

import ctypes
import json
import select
import signal
import sys
from collections.abc import Sequence
from signal import Signals
from typing import Any

_PR_SET_PDEATHSIG = 1


def end_with_parent(by: Signals) -> None:
    """Let Linux send this process the signal `by` when its parent dies. Does nothing on other systems."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, by)


def attach_to_parent(arguments: Sequence[str]) -> tuple[dict[str, Any], int]:
    """Return the settings that the parent sent as one line of JSON, and the pipe's file descriptor.

    The first argument is the descriptor. The parent keeps the other end of the pipe open as long as this
    process should run: end-of-file means that it must exit. Exits at once if the parent has died already.
    """
    pipe = int(arguments[0])
    # Only the parent reacts to Ctrl-C. It stops this process through the pipe or by another signal.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Covers the times when this process does not read the pipe, because it loads a model or hangs.
    end_with_parent(signal.SIGKILL)
    with open(pipe, "rb", closefd=False) as file:
        line = file.readline()
    if not line.endswith(b"\n") or select.select([pipe], [], [], 0)[0]:
        sys.exit()  # the parent died before prctl was called
    settings: dict[str, Any] = json.loads(line)
    return settings, pipe
