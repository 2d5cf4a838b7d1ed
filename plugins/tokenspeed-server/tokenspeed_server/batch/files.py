"""The files of a batch: checks before the run, errors of the disk, progress, and the summary."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from tqdm import tqdm

from tokenspeed_core.commands.serving import ConfigError
from tokenspeed_server.batch.lines import count_lines, read_lines
from tokenspeed_server.batch.runner import BatchRunner, Counts, Post

INTERRUPTED = 130  # the exit status after Ctrl-C
LINE_OVERHEAD = 4096  # bytes of a line around its body

_DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})


def check_paths(source: Path, target: Path, *, overwrite: bool) -> None:
    """Raise ConfigError for paths that cannot work."""
    if not source.is_file():
        what = "is a folder" if source.is_dir() else "does not exist"
        raise ConfigError(f"{source} {what}. Give a file with one request per line.")
    if not target.parent.is_dir():
        raise ConfigError(f"the folder of {target} does not exist. Create it, or choose another.")
    if target.is_dir():
        raise ConfigError(f"{target} is a folder. Give a file for the results.")
    if target.exists() and source.samefile(target):
        raise ConfigError(f"{target} is both input and output. Choose another output.")
    if target.exists() and not overwrite:
        raise ConfigError(f"{target} exists. Choose another file, or add --overwrite.")
    if not os.access(target.parent, os.W_OK):
        raise ConfigError(f"no permission to write to {target.parent}.")


def run_on_files(
    source: Path,
    target: Path,
    answer: Callable[[IO[bytes], IO[bytes]], Awaitable[bool]],
    counts: Callable[[], Counts],
    *,
    overwrite: bool,
) -> int:
    """Run `answer` on the open files, print a summary, and return the exit status.

    `answer` returns whether all lines were answered. Raises ConfigError if the disk is full.
    """

    async def run(reading: IO[bytes], writing: IO[bytes]) -> bool:
        return await answer(reading, writing)

    with readable_write_errors(target), ExitStack() as opened:
        try:
            reading = opened.enter_context(source.open("rb"))
            writing = opened.enter_context(target.open("wb" if overwrite else "xb"))
        except OSError as error:
            raise ConfigError(f"{error.filename}: {error.strerror}") from error
        is_whole = asyncio.run(run(reading, writing))
    return _report(counts(), target, is_whole)


@contextmanager
def readable_write_errors(target: Path) -> Iterator[None]:
    """Raise ConfigError if the results do not fit on the disk."""
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            raise
        reason = os.strerror(error.errno or 0)
        raise ConfigError(f"{target}: {reason}. The results are incomplete.") from error


def stop_on_signals() -> asyncio.Future[None]:
    """Return a future of the running loop that SIGINT and SIGTERM complete."""
    loop = asyncio.get_running_loop()
    stopped = loop.create_future()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, stopped)
    return stopped


def stop(stopped: asyncio.Future[None]) -> None:
    """Complete a future, once."""
    if not stopped.done():
        stopped.set_result(None)


def file_runner(
    post: Post, reading: IO[bytes], writing: IO[bytes], *, concurrency: int, max_body_bytes: int
) -> tuple[BatchRunner, tqdm[None]]:
    """Return a runner over a file, and its progress bar, which only a terminal shows. Close the bar."""
    has_bar = sys.stderr.isatty()
    total = count_lines(reading) if has_bar else None
    bar: tqdm[None] = tqdm(total=total, desc="Answering", unit="req", disable=not has_bar)

    def show(counts: Counts) -> None:
        bar.set_postfix_str(f"{counts.num_failed} failed", refresh=False)
        bar.update()

    lines = read_lines(reading, max_body_bytes + LINE_OVERHEAD)
    return BatchRunner(post, lines, writing, concurrency=concurrency, on_progress=show), bar


def _report(counts: Counts, target: Path, is_whole: bool) -> int:
    num_results = counts.num_answered + counts.num_failed
    summary = f"{num_results} results in {target}: {counts.num_failed} failed"
    if not is_whole:
        summary = f"interrupted; {summary}, and the other lines have no result"
    with suppress(OSError):  # stderr may be closed
        print(f"tokenspeed: {summary}", file=sys.stderr, flush=True)
    if not is_whole:
        return INTERRUPTED
    return 1 if counts.num_failed else 0
