"""The progress of a start on a terminal."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys

STARTS = """
import logging, os, signal, sys
from tokenspeed_core.engine.progress import StartProgress
logging.basicConfig(level="INFO", format="%(message)s")
with StartProgress() as progress:
    for stage in "weights", "graphs":
        for done in range(4):
            progress.report(stage, done, 3)
        logging.info("after %s", stage)
    progress.report("more", 1, 3)
    os.kill(os.getpid(), int(sys.argv[1]))
"""


def shown(number: int) -> str:
    """Return the terminal output of a start that ends by sending itself a signal."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", STARTS, str(number)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "80"},
    )
    os.close(theirs)
    output = b""
    try:
        while part := os.read(ours, 4096):
            output += part
    except OSError:  # Linux: the other end is closed
        pass
    os.close(ours)
    process.wait(30)
    return output.decode()


def test_each_stage_and_message_has_its_own_line() -> None:
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in shown(0).split("\n")]
    last = [
        re.split("\r", line.rstrip("\r"))[-1].strip() for line in lines
    ]  # what stays of a line drawn anew
    assert [line.split()[0] for line in last if line] == [
        "weights",
        "after",
        "graphs",
        "after",
        "more",
    ]
    assert [line for line in last if "after" in line] == ["after weights", "after graphs"]


def test_killed_start_does_not_hide_the_cursor() -> None:
    assert "more" in shown(signal.SIGKILL)
    assert "\x1b[?25l" not in shown(signal.SIGKILL)
