"""Defers Ctrl-C to the end of a step, since an interrupted step could never be collected."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

STUCK_SECONDS = 5.0  # that a step may take after Ctrl-C if it waits for other processes


@contextmanager
def deferred_interrupts(
    end_stuck_step: Callable[[], None] | None = None,
) -> Iterator[Callable[[], None]]:
    """Defer Ctrl-C; yield a function that raises KeyboardInterrupt if it was pressed.

    A second Ctrl-C raises at once. A step that waits for another process runs no signal handler: `end_stuck_step` is
    called, from another thread, if the block has not ended `STUCK_SECONDS` after the first Ctrl-C. Does nothing
    outside the main thread, which alone gets signals, or if the program handles SIGINT itself.
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
        if end_stuck_step is None:
            yield check
        else:
            with _watched(end_stuck_step):
                yield check
    except Exception as error:
        if is_pressed:
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    check()


@contextmanager
def _watched(end_stuck_step: Callable[[], None]) -> Iterator[None]:
    """Call a function from another thread if a block is still running `STUCK_SECONDS` after SIGINT.

    Python writes the number of each signal to one descriptor only. The thread passes them on to the descriptor that the
    program had set before, such as that of an event loop.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    timer = threading.Timer(STUCK_SECONDS, end_stuck_step)
    timer.daemon = True

    def watch() -> None:
        while number := os.read(reading, 1):
            if before >= 0:
                with suppress(OSError):  # it is full or closed
                    os.write(before, number)
            if number[0] == signal.SIGINT and timer.ident is None:
                timer.start()

    thread = threading.Thread(target=watch, name="interrupts", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writing)
        thread.join()
        os.close(reading)
        timer.cancel()
