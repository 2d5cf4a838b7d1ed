"""The start of our own child processes, which must not outlive their parent, however it ends."""

from __future__ import annotations

import ctypes
import select
import signal
import sys
from collections.abc import Sequence
from signal import Signals
from typing import Any

import msgpack

_PR_SET_PDEATHSIG = 1


def end_with_parent(by: Signals) -> None:
    """Have the kernel send this process `by` when its parent ends. Without effect where the system is not Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, by)


def attach_to_parent(arguments: Sequence[str]) -> tuple[dict[str, Any], int]:
    """Return what the parent tells through the pipe of this number, and the pipe, which is closed when it must end.

    Ends the process where the parent is gone.
    """
    pipe = int(arguments[0])
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C is for the first process, which drains this one
    end_with_parent(signal.SIGKILL)  # also where it cannot look at the pipe: loading, or stuck
    with open(pipe, "rb", buffering=0, closefd=False) as file:
        told: dict[str, Any] = next(msgpack.Unpacker(file), {})
    if select.select([pipe], [], [], 0)[0]:  # it ended before the kernel was asked to say so
        sys.exit()
    return told, pipe
