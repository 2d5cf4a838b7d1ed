"""Ctrl-C while `LLM` generates."""

from __future__ import annotations

import signal
import socket
import threading
from types import FrameType

import pytest

from tokenspeed_core.engine import interrupts
from tokenspeed_core.engine.interrupts import deferred_interrupts


def test_interrupt_is_deferred_to_the_end_of_the_step() -> None:
    done = []

    def generate() -> None:
        with deferred_interrupts() as check:
            check()
            signal.raise_signal(signal.SIGINT)
            done.append("the step")
            check()
            done.append("the next step")

    with pytest.raises(KeyboardInterrupt):
        generate()
    assert done == ["the step"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_interrupt_in_the_last_step_is_not_lost() -> None:
    with pytest.raises(KeyboardInterrupt), deferred_interrupts():
        signal.raise_signal(signal.SIGINT)


def test_second_interrupt_raises_at_once() -> None:
    done = []

    def generate() -> None:
        with deferred_interrupts():
            signal.raise_signal(signal.SIGINT)
            done.append("held")
            signal.raise_signal(signal.SIGINT)
            done.append("held again")

    with pytest.raises(KeyboardInterrupt):
        generate()
    assert done == ["held"]


def test_handler_of_the_program_stays() -> None:
    came = []

    def handler(number: int, frame: FrameType | None) -> None:
        came.append(number)

    before = signal.signal(signal.SIGINT, handler)
    try:
        with deferred_interrupts() as check:
            signal.raise_signal(signal.SIGINT)
            check()
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert came == [signal.SIGINT]


def test_signals_are_deferred_only_in_the_main_thread() -> None:
    handlers = []

    def hold() -> None:
        with deferred_interrupts() as check:
            check()
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=hold)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]


def test_step_that_outlives_an_interrupt_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "STUCK_SECONDS", 0.01)
    ended = threading.Event()

    def generate() -> None:
        with deferred_interrupts(ended.set):
            signal.raise_signal(signal.SIGINT)
            assert ended.wait(10)

    with pytest.raises(KeyboardInterrupt):
        generate()


def test_step_that_ends_in_time_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "STUCK_SECONDS", 1.0)
    ended = threading.Event()
    with pytest.raises(KeyboardInterrupt), deferred_interrupts(ended.set):
        signal.raise_signal(signal.SIGINT)
    for each in threading.enumerate():
        if isinstance(each, threading.Timer):
            each.join()
    assert not ended.is_set()


def test_wakeup_descriptor_of_the_program_gets_all_signals() -> None:
    theirs, ours = socket.socketpair()
    with theirs, ours:
        theirs.settimeout(10)
        ours.setblocking(False)
        old = signal.signal(signal.SIGUSR1, lambda number, frame: None)
        before = signal.set_wakeup_fd(ours.fileno())
        try:
            with deferred_interrupts(lambda: None):
                signal.raise_signal(signal.SIGUSR1)
                assert theirs.recv(1) == bytes([signal.SIGUSR1])
            assert signal.set_wakeup_fd(before) == ours.fileno()
        finally:
            signal.set_wakeup_fd(before)
            signal.signal(signal.SIGUSR1, old)
