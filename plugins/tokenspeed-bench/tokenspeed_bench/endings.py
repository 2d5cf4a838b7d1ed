"""How a measurement ends before its time: with what was measured kept, and what was started stopped."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
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
    before = {number: handler for number, handler in handlers.items() if handler not in (signal.SIG_IGN, None)}

    def end(number: int, frame: FrameType | None) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler) and handler is not signal.default_int_handler:  # a step that must not be broken in two
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


def left_to_the_parent() -> None:
    """Ignore in a child process what its parent hears, which then ends it."""
    for number in (signal.SIGINT, *ENDINGS):
        signal.signal(number, signal.SIG_IGN)
