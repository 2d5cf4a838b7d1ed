"""One line on a terminal that says how far a measurement is; nothing elsewhere."""

from __future__ import annotations

import sys
from contextlib import suppress
from types import TracebackType
from typing import Self

CLEAR = "\r\x1b[2K"


class Progress:
    """Shows `say(text)` in place on stderr while it is a terminal; a context manager that leaves the line empty."""

    def __init__(self) -> None:
        self._shows = sys.stderr.isatty()

    def say(self, text: str) -> None:
        """Replace what the line says."""
        if self._shows:
            with suppress(OSError):  # the terminal was closed
                sys.stderr.write(CLEAR + text)
                sys.stderr.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.say("")
