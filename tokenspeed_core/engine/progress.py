"""Progress of an engine's start: a bar on a terminal, one line per stage elsewhere."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, suppress


class StartProgress(AbstractContextManager["StartProgress"]):
    """Shows the stages of a start on stderr."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._shown = "\n"

    def report(self, stage: str, done: int, total: int) -> None:
        """Show how much of a stage is done. A bar ends its line when the stage is complete."""
        if not self._is_terminal:
            self._show(f"{stage} ...\n")
            return
        percent = 100 * done // max(total, 1)
        end = "\n" if done >= total else ""
        self._show(f"\r{stage:8} {'=' * (percent * 2 // 5):40} {percent:3} %{end}")

    def _show(self, text: str) -> None:
        if text != self._shown:
            self._shown = text
            # The disk of a log may be full, and stderr closed. The start goes on.
            with suppress(OSError):
                print(text, end="", file=sys.stderr, flush=True)

    def __exit__(self, *error: object) -> None:
        if not self._shown.endswith("\n"):
            self._show("\n")
