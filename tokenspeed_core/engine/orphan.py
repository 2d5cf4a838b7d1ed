"""The start of our own child processes, which must not outlive their parent, however it ends."""

from __future__ import annotations

import ctypes
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from signal import Signals
from typing import Any

import msgpack

_PR_SET_PDEATHSIG = 1


def end_with_parent(by: Signals) -> None:
    """Have the kernel send this process `by` when its parent ends. Without effect where the system is not Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, by)


def begin(arguments: Sequence[str]) -> tuple[dict[str, Any], int]:
    """Read a file's name and a number; return what the file says, and the pipe that is closed when it must end."""
    config_file, parent_fd = arguments
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the first process, which drains this one
    end_with_parent(signal.SIGKILL)  # also where it cannot look at the pipe: loading, or stuck
    told: dict[str, Any] = msgpack.unpackb(Path(config_file).read_bytes())
    return told, int(parent_fd)
