"""Progress display: in place on a terminal, occasional lines elsewhere."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from types import TracebackType
from typing import Self

CLEAR = "\r\x1b[2K"
SPARSE = 30.0  # seconds between lines if stderr is not a terminal


class Progress:
    """Shows progress on stderr; a context manager.

    On a terminal each text replaces the one before, and the last is erased. Elsewhere a line is
    printed at the start and every 30 seconds.
    """

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._due = 0.0

    def say(self, text: str) -> None:
        """Show the current progress."""
        if self._is_terminal:
            self._write(CLEAR + text)
        elif time.monotonic() >= self._due:
            self._due = time.monotonic() + SPARSE
            self._write(f"... {text}\n")

    def _write(self, text: str) -> None:
        with suppress(OSError):  # the terminal was closed, or the disk is full
            sys.stderr.write(text)
            sys.stderr.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._is_terminal:
            self._write(CLEAR)
