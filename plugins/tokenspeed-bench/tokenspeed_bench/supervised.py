"""Runs a `tokenspeed` command that ends with its parent: `python -m tokenspeed_bench.supervised WORDS`.

Its stdin is a pipe that closes when the parent ends. The command then gets SIGTERM, and SIGKILL
later.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from importlib.metadata import distribution
from typing import Any

STOP_SECONDS = 90.0  # that the command has to stop


def start(words: Sequence[str], **more: Any) -> subprocess.Popen[bytes]:
    """Start a command that is ended when this process ends. `more` are arguments of Popen."""
    command = [sys.executable, "-P", "-m", "tokenspeed_bench.supervised", *words]
    return subprocess.Popen(command, stdin=subprocess.PIPE, **more)


def _stop_with_the_parent() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(STOP_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    threading.Thread(target=_stop_with_the_parent, daemon=True).start()
    (tokenspeed,) = distribution("tokenspeed-core").entry_points.select(
        group="console_scripts", name="tokenspeed"
    )
    sys.exit(tokenspeed.load()())
