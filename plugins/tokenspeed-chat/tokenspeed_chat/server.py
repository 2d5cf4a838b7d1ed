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

from tokenspeed_server.settings import ServerConfig

from tokenspeed_chat.client import ChatClient
from tokenspeed_chat.screen import Progress, Screen
from tokenspeed_core.commands.settings import (
    EngineDeadError,
    end_with_parent,
    key_for_server,
    without_settings,
)

POLL_SECONDS = 0.1  # between checks of a starting server
STOP_SECONDS = 30.0  # that a server may take to end before it is killed


@contextmanager
def started_server(config: ServerConfig, screen: Screen) -> Iterator[str]:
    """Start `tokenspeed serve` with this configuration; yield its URL; stop it at the end.

    Its port is the configured one, or a free one. The screen shows the progress of the start.

    It also stops on SIGTERM, when the terminal closes, and when this process is killed. The
    configuration is passed through a pipe, so that no file is left. Raises EngineDeadError with
    the last lines of the server if it ends before it is healthy.
    """
    is_chosen = "port" in config.model_fields_set and config.port
    port = config.port if is_chosen else _free_port()
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
        with suppress(BrokenPipeError), server.stdin:  # the check below reports a dead server
            json.dump(values, server.stdin)
        url = f"http://127.0.0.1:{port}"
        with screen.progress(f"starting {config.model or 'the demo model'} ...") as progress:
            is_ready = _is_ready(
                server, ChatClient(url, key_for_server(config.api_key)), lines, progress
            )
        if not is_ready:
            reader.join(POLL_SECONDS)  # for its last lines
            output = "".join(lines)
            raise EngineDeadError(
                f"the server ended with status {server.returncode} during its start:\n{output}".strip()
            )
        yield url
    finally:
        _stop(server)


def _is_ready(
    server: subprocess.Popen[str], client: ChatClient, lines: deque[str], progress: Progress
) -> bool:
    """Wait until a server is ready or has ended; show its last line."""
    while not client.is_ready():
        if server.poll() is not None:
            return False
        if lines:
            progress.update(lines[-1].strip())
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
