"""Fills the masks of a step, and abandons grammars that take too long."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Protocol

from tokenspeed_core.api.step import I32
from tokenspeed_core.engine.grammars.sequence import SequenceGrammar

MAX_SECONDS = 0.04  # for all rows of a request in a step; then the request ends
_POLL_SECONDS = 0.005


@dataclass(frozen=True, slots=True, eq=False)
class MaskRow:
    """One sequence of a step, its output tokens that its grammar has not read, and its draft tokens."""

    request_id: int
    grammar: SequenceGrammar
    token_ids: list[int]
    draft_ids: Sequence[int] = ()

    @property
    def num_masks(self) -> int:
        """The masks of the row: one for each of its query tokens."""
        return 1 + len(self.draft_ids)

    def fill(self, masks: I32) -> None:
        """Let the grammar read its tokens and fill the masks, int32 [num_masks, W]."""
        self.grammar.read(self.token_ids)
        if self.draft_ids:
            self.grammar.fill_drafts(self.draft_ids, masks)
        else:
            self.grammar.fill(masks[0])


class MaskFiller(Protocol):
    """Fills the masks of a step."""

    def fill(self, rows: Sequence[MaskRow]) -> tuple[I32, list[int]]:
        """Return the masks of all rows, int32 [M, W], and the indices of the rows whose request took too long.

        The mask is valid until the next call.
        """

    def close(self) -> None:
        """End its threads. Does not wait."""


class DirectFiller:
    """Fills masks in the calling thread, for backends that bound the time of each call."""

    def __init__(self, mask: I32, max_seconds: float = MAX_SECONDS) -> None:
        """Use a buffer for the masks of the largest step, int32 [M, W]."""
        self._mask = mask
        self._max_seconds = max_seconds

    def fill(self, rows: Sequence[MaskRow]) -> tuple[I32, list[int]]:
        """See `MaskFiller.fill`."""
        too_slow: list[int] = []
        ends = _ends(rows)
        for group in _groups(rows):
            end = time.thread_time() + self._max_seconds
            for i in group:
                rows[i].fill(self._mask[ends[i] - rows[i].num_masks : ends[i]])
                if time.thread_time() > end:
                    too_slow += group
                    break
        return self._mask[: ends[-1]], too_slow

    def close(self) -> None:
        """Do nothing."""


class ThreadFiller:
    """Fills masks in a thread, so that no grammar can block the step loop.

    A new thread replaces one that a grammar blocks.
    """

    def __init__(self, mask: I32, max_seconds: float = MAX_SECONDS) -> None:
        """Use a buffer for the masks of the largest step, int32 [M, W]. Start no thread before the first step."""
        self._mask = mask
        self._max_seconds = max_seconds
        self._worker: _Worker | None = None

    def fill(self, rows: Sequence[MaskRow]) -> tuple[I32, list[int]]:
        """See `MaskFiller.fill`."""
        groups = _groups(rows)
        too_slow: list[int] = []
        while groups:
            worker = self._worker = self._worker or _Worker()
            worker.begin(rows, self._mask, groups)
            if self._wait(worker):
                break
            self._worker = None
            too_slow += groups[worker.group]
            groups = groups[worker.group + 1 :]
            # The replaced thread may still write into the old mask.
            self._mask = self._mask.copy()
        return self._mask[: _ends(rows)[-1]], too_slow

    def close(self) -> None:
        """End the thread after its current grammar. Does not wait."""
        if self._worker is not None:
            self._worker.end()
            self._worker = None

    def _wait(self, worker: _Worker) -> bool:
        """Wait until a worker is done. Returns False, and ends it, if one of its grammars takes too long."""
        while not worker.wait(_POLL_SECONDS):
            if worker.end_if_slow(self._max_seconds):
                return False
        return True


class _Worker:
    """A thread, and the request that it handles, as an index of groups of rows."""

    def __init__(self) -> None:
        self.group = 0
        self._began_at = _now()
        self._lock = Lock()  # held to begin a grammar and to end
        self._is_ended = False
        self._jobs: SimpleQueue[tuple[Sequence[MaskRow], I32, list[list[int]]] | None] = (
            SimpleQueue()
        )
        self._done: SimpleQueue[None] = SimpleQueue()
        Thread(target=self._run, name="masks", daemon=True).start()

    def begin(self, rows: Sequence[MaskRow], mask: I32, groups: list[list[int]]) -> None:
        """Fill the masks of groups of rows. The rows of a group belong to one request."""
        self._begin_group(0)
        self._jobs.put((rows, mask, groups))

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds` for the job to end. Returns whether it ended."""
        try:
            self._done.get(timeout=seconds)
        except Empty:
            return False
        return True

    def end_if_slow(self, max_seconds: float) -> bool:
        """End the thread if the current request takes too long. Returns whether it does.

        Time in which the process did not run does not count.
        """
        with self._lock:
            seconds = min(now - then for now, then in zip(_now(), self._began_at, strict=True))
            self._is_ended = seconds > max_seconds
        if self._is_ended:
            self._jobs.put(None)
        return self._is_ended

    def end(self) -> None:
        """End the thread after its current grammar."""
        with self._lock:
            self._is_ended = True
        self._jobs.put(None)

    def _begin_group(self, index: int) -> bool:
        """Record which group the thread starts. Returns False if the thread must end."""
        with self._lock:
            if not self._is_ended:
                self._began_at, self.group = _now(), index
            return not self._is_ended

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            rows, mask, groups = job
            ends = _ends(rows)
            for index, group in enumerate(groups):
                if not self._begin_group(index):
                    return
                for i in group:
                    if self._is_ended:
                        return
                    rows[i].fill(mask[ends[i] - rows[i].num_masks : ends[i]])
            if self._is_ended:
                return
            self._done.put(None)


def _groups(rows: Sequence[MaskRow]) -> list[list[int]]:
    """Return the indices of the rows of each request."""
    by_request: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        by_request.setdefault(row.request_id, []).append(i)
    return list(by_request.values())


def _ends(rows: Sequence[MaskRow]) -> list[int]:
    """Return the end of each row's masks."""
    return list(accumulate(row.num_masks for row in rows))


def _now() -> tuple[float, float]:
    """Return the real time, and the processor time of this process."""
    return time.monotonic(), time.process_time()
