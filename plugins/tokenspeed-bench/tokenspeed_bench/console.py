"""Console output of a measurement. A closed terminal or a full disk does not lose figures."""

from __future__ import annotations

import sys
from contextlib import suppress

from tokenspeed_bench.errors import BenchError


def warn(text: str) -> None:
    """Print a warning to stderr. Errors while writing are ignored."""
    with suppress(OSError):
        print(f"tokenspeed: {text}", file=sys.stderr, flush=True)


class Console:
    """Prints results to stdout, or to stderr if stdout takes the JSON.

    `stream` is the chosen stream. `is_lost` is true if it failed and the measurement continued for
    the JSON file.
    """

    def __init__(self, json_path: str | None) -> None:
        self.stream = sys.stderr if json_path == "-" else sys.stdout
        self._file = json_path
        self.is_lost = False

    def say(self, text: str) -> None:
        """Print a text. Raises BenchError or BrokenPipeError if that fails and no file takes the result."""
        if self.is_lost:
            return
        try:
            print(text, file=self.stream, flush=True)
        except OSError as error:
            if self._file is None:
                if isinstance(error, BrokenPipeError):
                    raise
                raise BenchError(
                    f"the standard output: {error.strerror}. Use --json FILE to keep the result."
                ) from error
            self.is_lost = True
            warn(
                f"cannot print the results ({error.strerror}); the measurement continues for --json {self._file}"
            )
