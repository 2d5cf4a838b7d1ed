"""Compiles grammars in threads, and caches them."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Thread
from typing import NamedTuple, Protocol

import numpy as np

from tokenspeed_core.api.grammars import (
    CompiledGrammar,
    GrammarCompiler,
    GrammarError,
    GrammarKind,
)

MAX_GRAMMARS = 512  # cached
MAX_BYTES = 1 << 30  # of cached grammars, as the backend estimates them
MAX_PENDING = 64  # different grammars that wait or are compiled
NUM_THREADS = 2

log = logging.getLogger("tokenspeed.engine")


class GrammarKey(NamedTuple):
    """The identity of a grammar."""

    kind: GrammarKind
    text: str


class Refusal(NamedTuple):
    """Why a grammar cannot be used. `reason` is the reason of a `Rejected` message."""

    reason: str
    message: str


class Checker(Protocol):
    """Checks a grammar before it is compiled in this process."""

    def check(self, kind: str, text: str) -> None:
        """Raise GrammarError if it is invalid, or needs too much time or memory."""

    def close(self) -> None:
        """Free its resources."""


Result = CompiledGrammar | Refusal


class GrammarCache:
    """The grammars and refusals used last, bounded in number and bytes."""

    def __init__(self, max_grammars: int = MAX_GRAMMARS, max_bytes: int = MAX_BYTES) -> None:
        """Start empty."""
        self._results: OrderedDict[GrammarKey, Result] = OrderedDict()
        self._max_grammars = max_grammars
        self._max_bytes = max_bytes
        self.num_bytes = 0

    def __len__(self) -> int:
        """Return the number of grammars and refusals."""
        return len(self._results)

    def get(self, key: GrammarKey) -> Result | None:
        """Return a result, if it is cached."""
        result = self._results.get(key)
        if result is not None:
            self._results.move_to_end(key)
        return result

    def put(self, key: GrammarKey, result: Result) -> None:
        """Add a result, and drop those used longest ago beyond the bounds."""
        replaced = self._results.pop(key, None)
        if replaced is not None:
            self.num_bytes -= _num_bytes(key, replaced)
        self._results[key] = result
        self.num_bytes += _num_bytes(key, result)
        while len(self._results) > self._max_grammars or self.num_bytes > self._max_bytes:
            self.num_bytes -= _num_bytes(*self._results.popitem(last=False))


def _num_bytes(key: GrammarKey, result: Result) -> int:
    return 4 * len(key.text) + (0 if isinstance(result, Refusal) else result.num_bytes)


class CompilePool:
    """Threads that compile grammars, each with its own checker. Used by one thread."""

    def __init__(
        self,
        make_compiler: Callable[[], GrammarCompiler],
        make_checker: Callable[[], Checker],
        vocab_size: int,
        *,
        num_threads: int = NUM_THREADS,
        max_pending: int = MAX_PENDING,
    ) -> None:
        """Start no thread before the first grammar."""
        self.num_pending = 0
        self._make_compiler = make_compiler
        self._make_checker = make_checker
        self._vocab_size = vocab_size
        self._max_pending = max_pending
        self._num_threads = num_threads
        self._threads: list[Thread] = []
        self._jobs: SimpleQueue[GrammarKey | None] = SimpleQueue()
        self._done: SimpleQueue[tuple[GrammarKey, Result]] = SimpleQueue()

    @property
    def is_full(self) -> bool:
        """Whether no further grammar is accepted now."""
        return self.num_pending >= self._max_pending

    def start(self, key: GrammarKey) -> None:
        """Compile a grammar in a thread."""
        self.num_pending += 1
        if len(self._threads) < min(self.num_pending, self._num_threads):
            thread = Thread(target=self._run, name="grammars", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._jobs.put(key)

    def finished(self, seconds: float = 0.0) -> list[tuple[GrammarKey, Result]]:
        """Return the results since the last call. Waits up to `seconds` for one if some are pending."""
        found: list[tuple[GrammarKey, Result]] = []
        while self.num_pending:
            try:
                found.append(self._done.get(block=seconds > 0 and not found, timeout=seconds))
            except Empty:
                break
            self.num_pending -= 1
        return found

    def close(self) -> None:
        """End the threads after the grammars that they compile now. Does not wait."""
        for _ in self._threads:
            self._jobs.put(None)
        self._threads = []

    def _run(self) -> None:
        checker = self._make_checker()
        while (key := self._jobs.get()) is not None:
            self._done.put((key, self._compile(checker, key)))
        checker.close()

    def _compile(self, checker: Checker, key: GrammarKey) -> Result:
        try:
            checker.check(key.kind, key.text)
            compiled = self._make_compiler().compile(key.kind, key.text)
            # The first mask of a grammar takes the longest.
            compiled.matcher().fill(np.zeros(-(-self._vocab_size // 32), np.int32))
        except GrammarError as error:
            return Refusal("bad_grammar", f"invalid grammar ({key.kind}): {error}")
        except Exception as error:  # a plugin may raise anything, and the subprocess may not start
            log.exception("cannot compile a grammar: %s", error)
            return Refusal("internal", "the grammar could not be compiled; see the server log")
        return compiled
