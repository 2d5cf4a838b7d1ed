"""The end of a measurement: write the files, print the problems, choose the exit status."""

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
def keep_partial_result(result: dict[str, Any], problems: list[str]) -> Iterator[None]:
    """Catch Ctrl-C and errors in the block, so that the runs measured so far can be written.

    Raises TokenSpeedError if nothing was measured.
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
    """Write the files, print the problems, and return the exit status.

    The status is 2 if a file could not be written, 130 after Ctrl-C, 1 after a problem, else 0. A
    result without traffic replaces no file.
    """
    for each in problems:
        warn(each)
    is_empty, is_whole = not has_traffic(result), True
    if json_path is not None:
        if is_empty and json_path != "-" and Path(json_path).exists():
            warn(f"{json_path}: unchanged, because no traffic was measured")
        else:
            is_whole &= _try_write(partial(files.write_result, result, json_path))
    if plot is not None:
        if is_empty:
            warn(f"{plot}: not drawn, because no traffic was measured")
        else:
            is_whole &= _try_write(partial(files.write, plot, draw(result)))
    if not is_whole:
        return UNWRITTEN
    if result["is_interrupted"]:
        warn(
            "interrupted before any traffic was measured"
            if is_empty
            else "interrupted; the results so far are kept"
        )
        return INTERRUPTED
    return INCOMPLETE if problems or has_failed else 0


def _try_write(write: Callable[[], None]) -> bool:
    try:
        write()
    except BenchError as error:
        warn(str(error))
        return False
    return True
