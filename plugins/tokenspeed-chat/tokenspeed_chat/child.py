"""A server that lives as long as a conversation."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn

import typer

from tokenspeed_chat.client import ChatClient
from tokenspeed_core.commands.settings import Config, EngineDeadError, end_with_parent, without_settings

POLL = 0.1  # seconds between looks at a server that starts
PATIENCE = 30.0  # seconds that a server has to end before it is killed


@contextmanager
def started_server(config: Config) -> Iterator[str]:
    """Start `tokenspeed serve` with this configuration on a free port; yield its URL; stop it at the end.

    The end may be a signal to terminate or a closed terminal: they leave nothing behind either.
    Raises EngineDeadError, with the last of what the server said, when it ends before it is healthy.
    """
    port = _free_port()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    with tempfile.TemporaryDirectory(prefix="tokenspeed-chat-") as folder:
        settings = Path(folder) / "config.yaml"
        settings.touch(mode=0o600)  # it may hold the API key
        values = config.model_dump(mode="json", exclude_unset=True) | {"host": "127.0.0.1", "port": port}
        settings.write_text(json.dumps(values), encoding="utf-8")
        log = Path(folder) / "server.log"
        with log.open("wb") as output:
            server = subprocess.Popen(
                [sys.executable, "-P", "-m", "tokenspeed_core.cli", "serve", "--config", str(settings)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=without_settings(os.environ),  # they are in the file, where flags went first
                start_new_session=True,  # a Ctrl-C in the terminal stops the answer, not the server
                preexec_fn=partial(end_with_parent, signal.SIGTERM),  # also when the chat is killed
            )
        try:
            typer.echo(f"starting {config.model or 'the demo model'} ...", err=True)
            url = f"http://127.0.0.1:{port}"
            _wait(server, ChatClient(url, config.api_key), log)
            shutil.rmtree(folder)  # the server has read it; a chat that is killed has nothing left to remove
            yield url
        finally:
            _stop(server)


def _wait(server: subprocess.Popen[bytes], client: ChatClient, log: Path) -> None:
    while not client.is_healthy():
        if server.poll() is not None:
            said = log.read_text(errors="replace").strip().splitlines()[-20:]
            raise EngineDeadError(
                "\n".join([f"the server ended with status {server.returncode} before it could answer:", *said])
            )
        time.sleep(POLL)


def _stop(server: subprocess.Popen[bytes]) -> None:
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
