"""What people are told while a measurement goes on; nobody who listens costs no figures."""

from __future__ import annotations

import sys
from contextlib import suppress

from tokenspeed_bench.errors import BenchError


def warn(text: str) -> None:
    """Say on stderr what is wrong, if anybody is there: a terminal may be closed, a disk full."""
    with suppress(OSError):
        print(f"tokenspeed: {text}", file=sys.stderr, flush=True)


class Voice:
    """Says on the standard output, or on stderr where that takes the JSON, what was measured.

    `stream` is which of them. `is_lost`: it could not be said, and the measurement went on for the JSON file.
    """

    def __init__(self, json_path: str | None) -> None:
        self.stream = sys.stderr if json_path == "-" else sys.stdout
        self._file = json_path
        self.is_lost = False

    def say(self, text: str) -> None:
        """Say something. Raises BenchError or BrokenPipeError where nobody hears it and no file takes the result."""
        if self.is_lost:
            return
        try:
            print(text, file=self.stream, flush=True)
        except OSError as error:
            if self._file is None:
                if isinstance(error, BrokenPipeError):
                    raise
                raise BenchError(
                    f"the standard output: {error.strerror}; --json FILE takes the result"
                ) from error
            self.is_lost = True
            warn(
                f"the figures cannot be shown ({error.strerror}); the measurement goes on, for --json {self._file}"
            )
