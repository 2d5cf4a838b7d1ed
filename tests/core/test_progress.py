"""The progress of a start and of a batch on a terminal."""

from __future__ import annotations

import io
import os
import pty
import re
import signal
import subprocess
import sys

import pytest

from tokenspeed_core.engine.progress import BatchProgress

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
    ]  # the rest of a redrawn line
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


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "is_shown", "has_text"),
    [(Terminal, True, True), (Terminal, False, False), (io.StringIO, True, False)],
)
def test_batch_progress_is_for_terminals(
    stream: type[io.StringIO], is_shown: bool, has_text: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stderr = stream()
    monkeypatch.setattr("sys.stderr", stderr)
    with BatchProgress(3, is_shown=is_shown) as progress:
        progress.add(10, 1)
        progress.add(10, 2)
    assert ("3/3" in stderr.getvalue()) == has_text
