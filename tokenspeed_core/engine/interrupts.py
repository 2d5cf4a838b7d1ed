"""Ctrl-C between steps: an interrupted step could never be collected."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_interrupts() -> Iterator[Callable[[], None]]:
    """Defer Ctrl-C; yield a function that raises KeyboardInterrupt if it was pressed.

    A second Ctrl-C raises at once. Does nothing outside the main thread, which alone gets signals, or if
    the program handles SIGINT itself.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: None
        return
    is_pressed = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal is_pressed
        check()
        is_pressed = True

    def check() -> None:
        if is_pressed:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, handle)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    check()
