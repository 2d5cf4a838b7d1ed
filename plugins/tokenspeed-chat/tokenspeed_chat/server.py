"""A server that runs as long as a conversation."""

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

POLL_SECONDS = 0.1  # between checks of a starting server
STOP_SECONDS = 30.0  # that a server may take to end before it is killed


@contextmanager
def started_server(config: Config) -> Iterator[str]:
    """Start `tokenspeed serve` with this configuration on a free port; yield its URL; stop it at the end.

    It also stops on SIGTERM, when the terminal closes, and when this process is killed. The
    configuration is passed through a pipe, so that no file is left. Raises EngineDeadError with
    the last lines of the server if it ends before it is healthy.
    """
    port = _free_port()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _exit)
    given = config.model_dump(mode="json", exclude_unset=True)
    values = {
        "api_workers": 1,  # enough for one user
        **given,
        "host": "127.0.0.1",
        "port": port,
    }
    server = subprocess.Popen(
        [sys.executable, "-P", "-m", "tokenspeed_core.cli", "serve", "--config", "/dev/stdin"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        env=without_settings(os.environ),  # the configuration has them, after the flags
        start_new_session=True,  # Ctrl-C stops the answer, not the server
        preexec_fn=partial(end_with_parent, signal.SIGTERM),
    )
    try:
        assert server.stdin is not None
        assert server.stdout is not None
        lines: deque[str] = deque(maxlen=20)
        reader = Thread(target=lines.extend, args=(server.stdout,), daemon=True)
        reader.start()
        typer.echo(f"starting {config.model or 'the demo model'} ...", err=True)
        with suppress(BrokenPipeError), server.stdin:  # the check below reports a dead server
            json.dump(values, server.stdin)
        url = f"http://127.0.0.1:{port}"
        if not _is_healthy(server, ChatClient(url, config.api_key)):
            reader.join(POLL_SECONDS)  # for its last lines
            output = "".join(lines)
            raise EngineDeadError(
                f"the server ended with status {server.returncode} during its start:\n{output}".strip()
            )
        yield url
    finally:
        _stop(server)


def _is_healthy(server: subprocess.Popen[str], client: ChatClient) -> bool:
    """Wait until a server is healthy or has ended."""
    while not client.is_healthy():
        if server.poll() is not None:
            return False
        time.sleep(POLL_SECONDS)
    return True


def _stop(server: subprocess.Popen[str]) -> None:
    server.terminate()
    try:
        server.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
