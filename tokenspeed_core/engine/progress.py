"""What people see while an engine starts: a bar on a terminal, a line per stage elsewhere."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, suppress


class StartProgress(AbstractContextManager["StartProgress"]):
    """Shows `report(what, done, total)` calls on stderr, one stage after the other; a context manager."""

    def __init__(self) -> None:
        """Draw nothing yet."""
        self._is_terminal = sys.stderr.isatty()
        self._shown = "\n"

    def report(self, what: str, done: int, total: int) -> None:
        """Show that `done` of `total` is done of a stage. The line of one that is whole ends: the log goes on below."""
        percent = 100 * done // max(total, 1)
        bar = f"\r{what:8} {'=' * (percent * 2 // 5):40} {percent:3} %" + "\n" * (done >= total)
        self._show(bar if self._is_terminal else f"{what} ...\n")

    def _show(self, text: str) -> None:
        if text != self._shown:
            self._shown = text
            with suppress(OSError):  # a log on a full disk, or closed, is no reason not to start
                print(text, end="", file=sys.stderr, flush=True)

    def __exit__(self, *error: object) -> None:
        if not self._shown.endswith("\n"):
            self._show("\n")
