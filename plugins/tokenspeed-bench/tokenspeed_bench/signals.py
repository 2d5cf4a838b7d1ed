"""How a measurement ends before its time: with what was measured kept, and what was started stopped."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.context import ForkProcess
from types import FrameType

ENDINGS = (signal.SIGTERM, signal.SIGHUP)  # of a service manager, and of a terminal that closes


@contextmanager
def heard() -> Iterator[None]:
    """Have the first SIGTERM or SIGHUP of the block do what Ctrl-C does, and the later ones nothing.

    It raises KeyboardInterrupt, with the signal in it unless others handle Ctrl-C. One that is ignored, as SIGHUP is
    under nohup, stays so. Without effect on other threads than the main one.
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
        if (
            callable(handler) and handler is not signal.default_int_handler
        ):  # a step that must not be broken in two
            handler(number, frame)
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
def noted() -> Iterator[Callable[[], bool]]:
    """Note a Ctrl-C while the block runs, and what `heard` makes one; neither breaks it off.

    Yields a call that says whether one came, to be asked after the block too; a block within another shares its notes.
    A Ctrl-C that is ignored, as in a script's background job, stays so. Without effect on other threads than the main
    one.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is None or threading.current_thread() is not threading.main_thread():
        yield lambda: False
    elif isinstance(before, _Notes):
        yield before.has_come
    else:
        notes = _Notes(is_deaf=before is signal.SIG_IGN)
        signal.signal(signal.SIGINT, notes)
        try:
            yield notes.has_come
        finally:
            signal.signal(signal.SIGINT, before)


class _Notes:
    """A handler of signals that notes them; one that is deaf, all but SIGINT."""

    def __init__(self, is_deaf: bool) -> None:
        self._is_deaf = is_deaf
        self._num = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._num += number != signal.SIGINT or not self._is_deaf

    def has_come(self) -> bool:
        """Say whether one came."""
        return self._num > 0


@contextmanager
def running(processes: Sequence[ForkProcess]) -> Iterator[None]:
    """Start child processes, and kill them at the end of the block, however it comes.

    One that was left would hold up this process' own end: it is waited for then, and hears no SIGTERM.
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


def left_to_the_parent() -> None:
    """Ignore in a child process what its parent hears, which then ends it."""
    for number in (signal.SIGINT, *ENDINGS):
        signal.signal(number, signal.SIG_IGN)
