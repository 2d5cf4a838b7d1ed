"""Processes the lines of a batch file concurrently, and returns results in the order of the lines."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

from tokenspeed_server.asgi import Answer
from tokenspeed_server.batch.lines import (
    BatchRequest,
    LineError,
    error_line,
    parse_line,
    result_line,
)

Post = Callable[[str, bytes], Awaitable[Answer]]
"""Sends a JSON body to a path and returns the whole answer."""

MAX_RETRY_SECONDS = 5.0  # before a request is sent again after a full queue


@dataclass(slots=True)
class Counts:
    """The results of a batch so far."""

    num_answered: int = 0
    num_failed: int = 0


class _StoppedError(Exception):
    """The run was stopped before the request was answered."""


class BatchRunner:
    """One run over a file.

    Results wait until those before them are written, so at most `window` requests are read ahead.
    """

    def __init__(
        self,
        post: Post,
        lines: Iterator[bytes | LineError],
        output: IO[bytes],
        *,
        concurrency: int,
        on_progress: Callable[[Counts], None] = lambda counts: None,
    ) -> None:
        """Answer `lines` by `post`, `concurrency` at once, and write the results to `output`."""
        self.counts = Counts()
        self._post = post
        self._lines = lines
        self._output = output
        self._concurrency = concurrency
        self._window = 8 * concurrency
        self._on_progress = on_progress
        self._ids: set[str] = set()
        self._pending: deque[asyncio.Future[tuple[bytes, bool]]] = deque()  # in order of the lines
        self._num_running = 0
        self._has_read_all = False
        self._has_ended = asyncio.Event()  # a request or the run ended since the last look
        self._stop: asyncio.Future[None] | None = None

    async def run(self, stop: asyncio.Future[None]) -> bool:
        """Answer all lines, or until `stop` is done; return whether all were answered.

        Finished results are written in either case.
        """
        stop.add_done_callback(lambda _: self._has_ended.set())
        self._stop = stop
        try:
            while not stop.done() and self._fill():
                if self._num_running == 0:  # the window was full of bad lines
                    await asyncio.sleep(0)
                    continue
                self._has_ended.clear()
                await self._has_ended.wait()
            return self._has_read_all and not self._pending
        finally:
            await self._leave()

    def _fill(self) -> bool:
        """Start requests while there is room; return whether lines or results remain."""
        while self._num_running < self._concurrency and len(self._pending) < self._window:
            line = next(self._lines, None)
            if line is None:
                self._has_read_all = True
                break
            self._pending.append(self._start(line))
        self._write_heads()
        return bool(self._pending) or not self._has_read_all

    def _start(self, line: bytes | LineError) -> asyncio.Future[tuple[bytes, bool]]:
        try:
            request = self._read(line)
        except LineError as error:
            result: asyncio.Future[tuple[bytes, bool]] = asyncio.get_running_loop().create_future()
            result.set_result((error_line(error), False))
            return result
        self._num_running += 1
        task = asyncio.create_task(self._answer(request.custom_id, request.path, request.body))
        task.add_done_callback(self._on_end)
        return task

    def _read(self, line: bytes | LineError) -> BatchRequest:
        """Return the request of a line. Raises LineError, also if any earlier line has its id."""
        try:
            if isinstance(line, LineError):
                raise line
            request = parse_line(line)
        except LineError as error:
            if error.custom_id is not None:
                self._take_id(error.custom_id)
            raise
        self._take_id(request.custom_id)
        return request

    def _take_id(self, custom_id: str) -> None:
        if custom_id in self._ids:
            raise LineError(
                "duplicate_custom_id", "an earlier line has the same custom_id", custom_id
            )
        self._ids.add(custom_id)

    async def _answer(self, custom_id: str, path: str, body: bytes) -> tuple[bytes, bool]:
        while True:
            answer = await self._post(path, body)
            if self._stop is not None and self._stop.done():
                raise _StoppedError  # the answer may be an error that the stop caused
            if answer.status != 429:
                return result_line(custom_id, answer), answer.status == 200
            await asyncio.sleep(_retry_seconds(answer))

    def _on_end(self, task: asyncio.Future[tuple[bytes, bool]]) -> None:
        self._num_running -= 1
        self._has_ended.set()

    def _write_heads(self) -> None:
        """Write the results that all earlier lines precede."""
        while self._pending and self._pending[0].done():
            self._write(self._pending.popleft())

    def _write(self, ended: asyncio.Future[tuple[bytes, bool]]) -> None:
        line, is_answered = ended.result()
        self._output.write(line)
        if is_answered:
            self.counts.num_answered += 1
        else:
            self.counts.num_failed += 1
        self._on_progress(self.counts)

    async def _leave(self) -> None:
        """Write the finished results, and abort the other requests."""
        rest = [each for each in self._pending if not each.done()]
        for each in self._pending:
            if each.done() and not each.cancelled() and each.exception() is None:
                self._write(each)
        self._pending.clear()
        self._output.flush()
        for each in rest:
            each.cancel()
        for each in rest:
            with suppress(asyncio.CancelledError, Exception):
                await each


def _retry_seconds(answer: Answer) -> float:
    given = answer.headers.get("retry-after", "")
    return min(MAX_RETRY_SECONDS, float(given) if given.isdecimal() else 1.0)
