"""Starts and stops child processes, and makes the private folder of their sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenspeed_core.errors import CapacityError

_MAX_FOLDER = 68  # characters; the path of a socket, in a folder within another one, may have 107


def make_private_folder(parent: Path | None = None) -> Path:
    """Make a folder that only this user can read, within `parent` if given. Raises CapacityError."""
    base = parent or Path(os.environ.get("TMPDIR") or "/tmp")
    if parent is None and len(str(base)) > _MAX_FOLDER:
        base = Path("/tmp")
    try:
        return Path(tempfile.mkdtemp(prefix="tokenspeed-" if parent is None else "", dir=base))
    except OSError as error:
        raise CapacityError(
            f"cannot create a folder for the engine's sockets in {base}: {error.strerror}. "
            "Free space there, or choose another folder with TMPDIR."
        ) from error


def remove_folder(folder: Path) -> None:
    """Delete a folder, if it is still there."""
    shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Program:
    """A child's command, the data that it reads from its pipe, its listening socket, and other descriptors.

    Descriptors have the same numbers in the child. `given_fds` are closed in this process when the child has started.
    `name` identifies the child in messages about its end; it may be empty.
    """

    command: Sequence[str]
    data: Mapping[str, Any]
    listener: socket.socket | None = None
    shared_fds: Sequence[int] = ()
    given_fds: Sequence[int] = ()
    name: str = ""


async def start(program: Program, **data: Any) -> Subprocess:
    """Start a child process with additional `data`. It inherits stdout and stderr.

    Closes the child's listener in this process, which would otherwise receive some of its connections.
    """
    listen_fds = [] if program.listener is None else [program.listener.fileno()]
    reading, writing = os.pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            *program.command,
            str(reading),
            stdin=subprocess.DEVNULL,
            pass_fds=(reading, *listen_fds, *program.shared_fds, *program.given_fds),
            start_new_session=True,  # Ctrl-C in the terminal only reaches the first process
        )
    finally:
        os.close(reading)
    _send_settings(writing, {**program.data, **data, "listen_fds": listen_fds})
    if program.listener is not None:
        program.listener.close()
    for fd in program.given_fds:
        os.close(fd)
    return Subprocess(process, writing)


def start_with_log_pipe(program: Program) -> tuple[subprocess.Popen[bytes], int]:
    """Start a child whose stdout and stderr go to its `stdout` pipe, without an event loop.

    Returns the child and this end of the pipe that it reads. It ends when this process closes the pipe or ends.
    """
    reading, writing = os.pipe()
    try:
        child = subprocess.Popen(
            [*program.command, str(reading)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(reading, *program.shared_fds),
            start_new_session=True,  # as in `start`
        )
    except BaseException:
        os.close(writing)
        raise
    finally:
        os.close(reading)
    _send_settings(writing, program.data)
    return child, writing


def _send_settings(pipe: int, data: Mapping[str, Any]) -> None:
    """Write the one line that a child reads from its pipe. A child that ended already reads nothing."""
    line = json.dumps(data).encode() + b"\n"
    with contextlib.suppress(BrokenPipeError), open(pipe, "wb", closefd=False) as file:
        file.write(line)


def describe_end(code: int) -> str:
    """Return how a child with this return code ended, as part of a sentence."""
    if code >= 0:
        return f"exited with status {code}"
    name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
    hint = "; the system may have run out of memory" if -code == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"


class Subprocess:
    """A running child. It ends when this process closes the pipe or ends."""

    def __init__(self, process: asyncio.subprocess.Process, pipe: int) -> None:
        self._process = process
        self._pipe = pipe

    @property
    def has_crashed(self) -> bool:
        """Whether a signal other than SIGTERM ended it."""
        return (self._process.returncode or 0) < 0 and self._process.returncode != -signal.SIGTERM

    async def wait(self) -> str:
        """Wait for its end and return how it ended, as part of a sentence."""
        return describe_end(await self._process.wait())

    async def stop(self, seconds: float = 5.0) -> None:
        """Close the pipe, and kill the child unless it ends in time. Safe to call twice."""
        pipe, self._pipe = self._pipe, -1
        if pipe >= 0:
            os.close(pipe)
        try:
            await asyncio.wait_for(self._process.wait(), seconds)
        except TimeoutError:
            self.send(signal.SIGKILL)
            await self._process.wait()

    def tell(self, line: str) -> None:
        """Write a line to the pipe, unless it is closed."""
        if self._pipe >= 0:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._pipe, f"{line}\n".encode())

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if it runs."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)
