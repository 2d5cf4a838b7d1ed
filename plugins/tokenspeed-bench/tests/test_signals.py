"""Handling of SIGTERM and SIGHUP."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from misbehaving import Exchange, serving
from tokenspeed_bench import supervised
from tokenspeed_bench.errors import INTERRUPTED
from tokenspeed_bench.server import _stop
from tokenspeed_bench.signals import ENDINGS, deferred_interrupts, terminate_as_interrupt
from tokenspeed_bench.targets import _wait


@pytest.fixture
def default_signal_handlers() -> Iterator[None]:
    """Reset signals that the caller of the tests ignores, as nohup does."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in ENDINGS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("default_signal_handlers")
@pytest.mark.parametrize("number", ENDINGS)
def test_second_signal_is_ignored(
    number: signal.Signals,
) -> None:
    before = [signal.getsignal(each) for each in ENDINGS]
    with terminate_as_interrupt():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        for each in ENDINGS:
            signal.raise_signal(each)
    assert [signal.getsignal(each) for each in ENDINGS] == before


def test_sigterm_calls_the_sigint_handler() -> None:
    received: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: received.append(number))
    try:
        with terminate_as_interrupt():
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGINT, before)
    assert received == [signal.SIGTERM]


@pytest.mark.usefixtures("default_signal_handlers")
@pytest.mark.parametrize("handler", [signal.default_int_handler, signal.SIG_IGN])
@pytest.mark.parametrize("number", ENDINGS)
def test_deferred_signal_does_not_interrupt(number: signal.Signals, handler: Any) -> None:
    before = signal.signal(signal.SIGINT, handler)
    try:
        with terminate_as_interrupt(), deferred_interrupts() as is_interrupted:
            assert not is_interrupted()
            signal.raise_signal(number)
            assert is_interrupted()
            signal.raise_signal(number)
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_is_deferred_unless_it_is_ignored() -> None:
    before = signal.getsignal(signal.SIGINT)
    try:
        for handler in (signal.default_int_handler, signal.SIG_IGN):
            signal.signal(signal.SIGINT, handler)
            with deferred_interrupts() as is_interrupted:
                signal.raise_signal(signal.SIGINT)
                assert is_interrupted() is (handler is signal.default_int_handler)
    finally:
        signal.signal(signal.SIGINT, before)


def test_nested_deferrals_share_interrupts() -> None:
    with deferred_interrupts() as is_interrupted:
        with deferred_interrupts() as is_inner_interrupted:
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    assert is_interrupted()
    assert is_inner_interrupted()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_during_server_shutdown_kills_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ignores_sigterm = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", ignores_sigterm], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()

    def wait(timeout: float) -> None:
        monkeypatch.undo()
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(child, "wait", wait)
    with pytest.raises(KeyboardInterrupt):
        _stop(child)
    assert child.returncode == -signal.SIGKILL


def test_ignored_sighup_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with terminate_as_interrupt():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_signal_is_forwarded_to_the_child() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    with terminate_as_interrupt():
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
        assert _wait(child) == INTERRUPTED
    assert child.returncode == -signal.SIGTERM


def test_command_ends_with_its_parent() -> None:
    async def hangs(exchange: Exchange) -> None:
        await asyncio.sleep(60)

    with serving(hangs) as fake:
        child = supervised.start(["bench", "serve", "--url", fake.url])
        while not fake.exchanges:
            assert child.poll() is None
            time.sleep(0.05)
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait(30) == INTERRUPTED
