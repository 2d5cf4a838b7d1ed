"""Progress of a measurement on a terminal and in a log."""

from __future__ import annotations

import io
import sys
import time

import pytest
from tokenspeed_bench.progress import CLEAR, SPARSE, Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class ClosedTerminal(Terminal):
    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")


def printed(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> str:
    now = 1000.0
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stream)
        patch.setattr(time, "monotonic", lambda: now)
        with Progress() as progress:
            for i in range(4):
                progress.say(str(i))
                now += SPARSE / 2
    return stream.getvalue()


def test_terminal_progress_is_in_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert printed(Terminal(), monkeypatch) == "".join(
        CLEAR + text for text in ("0", "1", "2", "3", "")
    )


def test_log_progress_is_occasional_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert printed(io.StringIO(), monkeypatch) == "... 0\n... 2\n"


def test_closed_terminal_does_not_fail_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    assert printed(ClosedTerminal(), monkeypatch) == ""
