"""A server that lives as long as a conversation."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from threading import Thread
from types import FrameType
from typing import NoReturn

import typer

from tokenspeed_chat.client import ChatClient
from tokenspeed_core.commands.settings import (
    Config,
    EngineDeadError,
    end_with_parent,
    without_settings,
)

POLL = 0.1  # seconds between looks at a server that starts
PATIENCE = 30.0  # seconds that a server has to end before it is killed


@contextmanager
def started_server(config: Config) -> Iterator[str]:
    """Start `tokenspeed serve` with this configuration on a free port; yield its URL; stop it at the end.

    The end may be a signal to terminate or a closed terminal: they leave no server behind either. Nothing of it is
    ever on the disk, which may be full, and which a chat that is killed could not tidy. Raises EngineDeadError,
    with the last of what the server said, when it ends before it is healthy.
    """
    port = _free_port()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    asked = config.model_dump(mode="json", exclude_unset=True)
    values = {
        "api_workers": 1,
        **asked,
        "host": "127.0.0.1",
        "port": port,
    }  # one user needs one worker
    server = subprocess.Popen(
        [sys.executable, "-P", "-m", "tokenspeed_core.cli", "serve", "--config", "/dev/stdin"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        env=without_settings(os.environ),  # they are in what it reads, where flags went first
        start_new_session=True,  # a Ctrl-C in the terminal stops the answer, not the server
        preexec_fn=partial(end_with_parent, signal.SIGTERM),  # also when the chat is killed
    )
    try:
        assert server.stdin is not None
        assert server.stdout is not None
        said: deque[str] = deque(maxlen=20)
        listening = Thread(target=said.extend, args=(server.stdout,), daemon=True)
        listening.start()
        typer.echo(f"starting {config.model or 'the demo model'} ...", err=True)
        with suppress(BrokenPipeError), server.stdin:  # one that has ended is noticed below
            json.dump(values, server.stdin)
        url = f"http://127.0.0.1:{port}"
        if not _is_healthy(server, ChatClient(url, config.api_key)):
            listening.join(POLL)  # for what it said last
            told = f"the server ended with status {server.returncode} before it could answer:\n{''.join(said)}"
            raise EngineDeadError(told.strip())
        yield url
    finally:
        _stop(server)


def _is_healthy(server: subprocess.Popen[str], client: ChatClient) -> bool:
    """Wait until a server is healthy, or has ended."""
    while not client.is_healthy():
        if server.poll() is not None:
            return False
        time.sleep(POLL)
    return True


def _stop(server: subprocess.Popen[str]) -> None:
    server.terminate()
    try:
        server.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
