"""Our child processes: a private folder each, a start by argv, their death noticed, no orphan left."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenspeed_core.commands.serving import CapacityError

_MAX_FOLDER = 72  # characters; a socket's path may have 107
# Of a folder that is still there its maker was killed: his children, whom the system ends now, may look for it yet.
_CLEAN = (
    "import os, shutil, sys, time; sys.stdin.read(); time.sleep(os.path.isdir(sys.argv[1])); "
    "shutil.rmtree(sys.argv[1], ignore_errors=True)"
)


class PrivateFolder:
    """A folder only this user reads, for the sockets of children that are not connected yet.

    A process of its own removes it should this one be killed.
    """

    def __init__(self, parent: Path | None = None) -> None:
        """Raises CapacityError where no folder can be made."""
        # Not tempfile's, which raises where it cannot write a file there: a full disk may still take a folder.
        base = parent or Path(os.environ.get("TMPDIR") or "/tmp")
        if parent is None and len(str(base)) > _MAX_FOLDER:
            base = Path("/tmp")
        self.path = base / f"tokenspeed-{os.getuid()}-{os.urandom(4).hex()}"
        self._cleaner = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _CLEAN, str(self.path)],
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            self.path.mkdir(0o700)
        except OSError as error:
            self._cleaner.communicate()
            raise CapacityError(
                f"cannot make a folder for the engine's sockets in {base}: {error.strerror}; free space there, "
                "or name another with TMPDIR"
            ) from error

    def remove(self) -> None:
        """Delete the folder. Safe to call twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._cleaner.communicate()


@dataclass(frozen=True, slots=True)
class Program:
    """What a child runs, what it is told (plain data, which it reads from a pipe), and where it listens."""

    command: Sequence[str]
    told: Mapping[str, Any]
    listener: socket.socket | None = None


async def start(program: Program, **told: Any) -> Child:
    """Start a child, which is told something more. What it prints goes where this process prints.

    Its listener is closed here: nobody else would take the connections that the system gives it.
    """
    listen_fds = [] if program.listener is None else [program.listener.fileno()]
    data = json.dumps({**program.told, **told, "listen_fds": listen_fds}).encode() + b"\n"
    theirs, ours = os.pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            *program.command,
            str(theirs),
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs, *listen_fds),
            start_new_session=True,  # Ctrl-C in the terminal is for the first process, which drains
        )
    finally:
        os.close(theirs)
    with (
        contextlib.suppress(BrokenPipeError),
        open(ours, "wb", closefd=False) as pipe,
    ):  # it may have ended already
        pipe.write(data)
    if program.listener is not None:
        program.listener.close()
    return Child(process, ours)


class Child:
    """A child process. It ends itself when the pipe that this process holds is closed, however that is."""

    def __init__(self, process: asyncio.subprocess.Process, pipe: int) -> None:
        self._process, self._pipe = process, pipe

    @property
    def has_crashed(self) -> bool:
        """Whether a signal ended it, other than the one that asks a process to end."""
        return (self._process.returncode or 0) < 0 and self._process.returncode != -signal.SIGTERM

    async def wait(self) -> str:
        """Wait for its end and return how it ended, as part of a sentence."""
        code = await self._process.wait()
        if code >= 0:
            return f"exited with status {code}"
        name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
        hint = "; the system may have run out of memory" if -code == signal.SIGKILL else ""
        return f"was killed by {name}{hint}"

    async def stop(self, seconds: float = 5.0) -> None:
        """End it: by closing the pipe, then by force."""
        os.close(self._pipe)
        try:
            await asyncio.wait_for(self._process.wait(), seconds)
        except TimeoutError:
            self.send(signal.SIGKILL)
            await self._process.wait()

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if it runs."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)
