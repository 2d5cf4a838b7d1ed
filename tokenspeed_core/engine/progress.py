"""What people see while an engine starts: a bar on a terminal, a line per stage elsewhere."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class StartProgress:
    """Shows `report(what, done, total)` calls on stderr; a context manager."""

    def __init__(self) -> None:
        """Draw nothing yet."""
        self._console = Console(stderr=True)
        self._bars = Progress(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(), console=self._console, disable=not self._console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}

    def report(self, what: str, done: int, total: int) -> None:
        """Show that `done` of `total` is done of a stage."""
        if what not in self._tasks:
            self._tasks[what] = self._bars.add_task(what, total=total)
            if not self._console.is_terminal:
                with suppress(OSError):  # a log on a full disk, or closed, is no reason not to start
                    print(f"{what} ...", file=sys.stderr, flush=True)
        self._bars.update(self._tasks[what], completed=done, total=total)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bars.stop()
