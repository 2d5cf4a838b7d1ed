"""The end of a measurement: writes what was asked for, says what is missing, and decides the exit status."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from tokenspeed_bench import files
from tokenspeed_bench.console import warn
from tokenspeed_bench.errors import INTERRUPTED, BenchError
from tokenspeed_bench.plot import draw
from tokenspeed_bench.result import has_traffic
from tokenspeed_core import TokenSpeedError

UNWRITTEN, INCOMPLETE = 2, 1  # exit statuses


@contextmanager
def kept(result: dict[str, Any], problems: list[str]) -> Iterator[None]:
    """Note what ends the block too early, Ctrl-C among it, so that what was measured before can be written.

    Raises TokenSpeedError where nothing was.
    """
    try:
        yield
    except KeyboardInterrupt:
        result["is_interrupted"] = True
    except TokenSpeedError as error:
        if not has_traffic(result):
            raise
        problems.append(str(error))


def finish(
    result: Mapping[str, Any],
    json_path: str | None,
    plot: str | None,
    problems: Sequence[str],
    *,
    has_failed: bool,
) -> int:
    """Write the files, say the problems, and return the exit status.

    It is 2 where a file could not be written, and 1 after a problem or where a part failed. A result without traffic
    replaces no file.
    """
    for each in problems:
        warn(each)
    is_empty, is_whole = not has_traffic(result), True
    if json_path is not None:
        if is_empty and json_path != "-" and Path(json_path).exists():
            warn(f"{json_path}: left as it was, for no traffic was measured")
        else:
            is_whole &= _wrote(partial(files.write_result, result, json_path))
    if plot is not None:
        if is_empty:
            warn(f"{plot}: not drawn, for no traffic was measured")
        else:
            is_whole &= _wrote(partial(files.write, plot, draw(result)))
    if not is_whole:
        return UNWRITTEN
    if result["is_interrupted"]:
        warn(
            "broken off before any traffic was measured"
            if is_empty
            else "broken off; what was measured is kept"
        )
        return INTERRUPTED
    return INCOMPLETE if problems or has_failed else 0


def _wrote(write: Callable[[], None]) -> bool:
    try:
        write()
    except BenchError as error:
        warn(str(error))
        return False
    return True
