"""Early ends of a measurement: keep the results and stop the child processes."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.context import ForkProcess
from types import FrameType

ENDINGS = (signal.SIGTERM, signal.SIGHUP)  # sent by service managers, and by closing terminals


@contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """Treat the first SIGTERM or SIGHUP in the block like Ctrl-C, and ignore later ones.

    It raises KeyboardInterrupt, or calls the current SIGINT handler. A signal that is ignored, such
    as SIGHUP under nohup, stays ignored. It has no effect outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in ENDINGS}
    before = {
        number: handler
        for number, handler in handlers.items()
        if handler not in (signal.SIG_IGN, None)
    }

    def end(number: int, frame: FrameType | None) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler) and handler is not signal.default_int_handler:
            handler(number, frame)  # such as the one of deferred_interrupts
        else:
            raise KeyboardInterrupt(signal.Signals(number))

    for number in before:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def deferred_interrupts() -> Iterator[Callable[[], bool]]:
    """Record Ctrl-C in the block instead of raising it.

    Yields a function that returns whether Ctrl-C was pressed; nested blocks share the record. A SIGINT
    that is ignored stays ignored. It has no effect outside the main thread.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is None or threading.current_thread() is not threading.main_thread():
        yield lambda: False
    elif isinstance(before, _InterruptRecord):
        yield before.was_interrupted
    else:
        record = _InterruptRecord(ignores_sigint=before is signal.SIG_IGN)
        signal.signal(signal.SIGINT, record)
        try:
            yield record.was_interrupted
        finally:
            signal.signal(signal.SIGINT, before)


class _InterruptRecord:
    """A signal handler that counts signals, except SIGINT if `ignores_sigint`."""

    def __init__(self, ignores_sigint: bool) -> None:
        self._ignores_sigint = ignores_sigint
        self._num = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._num += number != signal.SIGINT or not self._ignores_sigint

    def was_interrupted(self) -> bool:
        """Return whether a signal was counted."""
        return self._num > 0


@contextmanager
def child_processes(processes: Sequence[ForkProcess]) -> Iterator[None]:
    """Start child processes, and kill them at the end of the block.

    A process that stayed alive would block this process's exit.
    """
    try:
        for each in processes:
            each.start()
        yield
    finally:
        started = [each for each in processes if each.pid is not None]
        for each in started:
            each.kill()
        for each in started:
            each.join()


def ignore_signals() -> None:
    """Ignore the signals in a child process that the parent handles for it."""
    for number in (signal.SIGINT, *ENDINGS):
        signal.signal(number, signal.SIG_IGN)
