"""A command of `tokenspeed` that ends with whoever started it: `python -m tokenspeed_bench.supervised WORDS`.

Its standard input is a pipe into which nothing is written. It closes when the starter ends, however that happens, and
the command is then told to stop, as by SIGTERM.
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

PATIENCE = 90.0  # seconds that the command has to stop


def start(words: Sequence[str], **more: Any) -> subprocess.Popen[bytes]:
    """Start a command, with more of what Popen takes; it ends at the latest when this process does."""
    command = [sys.executable, "-P", "-m", "tokenspeed_bench.supervised", *words]
    return subprocess.Popen(command, stdin=subprocess.PIPE, **more)


def _end_with_the_starter() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(PATIENCE)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    threading.Thread(target=_end_with_the_starter, daemon=True).start()
    (tokenspeed,) = distribution("tokenspeed-core").entry_points.select(
        group="console_scripts", name="tokenspeed"
    )
    sys.exit(tokenspeed.load()())
