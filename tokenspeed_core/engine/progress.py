"""Progress of an engine's start and of a batch of requests."""

from __future__ import annotations

import logging
import sys
import time
from contextlib import AbstractContextManager, suppress

from tqdm import tqdm

log = logging.getLogger("tokenspeed.start")


class StartProgress(AbstractContextManager["StartProgress"]):
    """Shows the stages of a start on stderr."""

    def __init__(self, *, has_bar: bool | None = None) -> None:
        """Draw a bar, or write to the log. By default a bar is drawn if stderr is a terminal."""
        self._has_bar = sys.stderr.isatty() if has_bar is None else has_bar
        self._stage = ""
        self._shown = "\n"

    def report(self, stage: str, done: int, total: int) -> None:
        """Show how much of a stage is done. A bar ends its line when the stage is complete."""
        if not self._has_bar:
            if stage != self._stage:
                self._stage = stage
                log.info("start: %s", stage)
            return
        percent = 100 * done // max(total, 1)
        end = "\n" if done >= total else ""
        self._show(f"\r{stage:9} {'=' * (percent * 2 // 5):40} {percent:3} %{end}")

    def _show(self, text: str) -> None:
        if text != self._shown:
            self._shown = text
            # The log's disk may be full, or stderr closed. The start continues.
            with suppress(OSError):
                print(text, end="", file=sys.stderr, flush=True)

    def __exit__(self, *error: object) -> None:
        if not self._shown.endswith("\n"):
            self._show("\n")


class BatchProgress(AbstractContextManager["BatchProgress"]):
    """A bar on stderr with the finished sequences of a batch; nothing unless stderr is a terminal."""

    def __init__(self, num_sequences: int, *, is_shown: bool) -> None:
        self._bar = tqdm(
            total=num_sequences,
            desc="Generating",
            unit="seq",
            disable=None if is_shown else True,  # None: unless stderr is a terminal
        )
        self._started_at = time.monotonic()
        self._num_tokens = 0

    def add(self, num_tokens: int, num_ended: int) -> None:
        """Count new tokens and sequences that ended."""
        if self._bar.disable:
            return
        self._num_tokens += num_tokens
        seconds = max(1e-9, time.monotonic() - self._started_at)
        self._bar.set_postfix_str(f"{self._num_tokens / seconds:.0f} tokens/s", refresh=False)
        self._bar.update(num_ended)

    def __exit__(self, *error: object) -> None:
        self._bar.close()
