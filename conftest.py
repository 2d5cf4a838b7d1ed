"""Starts the slowest test files first when files run in parallel, so that no process ends with a long one alone."""

from __future__ import annotations

import atexit
import gc
import os
import socket
from contextlib import ExitStack

import pytest

gc.disable()  # until the tests are collected, because imported modules are never freed

at_exit = ExitStack()
atexit.register(at_exit.close)  # last, because the modules that the tests import register later


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Let the workers of pytest-xdist end without freeing all modules and tests, which takes four seconds.

    With `--reruns`, each test sends two messages to the first process. The second one would wait 40 ms for the
    acknowledgement of the first one.
    """
    if hasattr(config, "workerinput"):
        at_exit.callback(os._exit, 0)
        connection = getattr(getattr(config, "failures_db", None), "sock", None)
        if connection is not None:  # of pytest-rerunfailures
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move the files with a test marked `slow` to the front, in the order in which they came."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    """Exclude the imported modules from garbage collection, which would take half a second each time."""
    gc.freeze()
    gc.enable()
    gc.set_threshold(50_000)  # 700 by default; tests run about 5% faster
    at_exit.callback(gc.unfreeze)  # or nanobind reports them as leaks
