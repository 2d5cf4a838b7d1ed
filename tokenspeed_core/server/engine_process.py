"""The engine as a child process: its private folder, its start by argv, its death noticed, no orphan left."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgpack

from tokenspeed_core.errors import CapacityError

_PREFIX = "tokenspeed-"
_MAX_FOLDER = 80  # characters; a socket's path may have 107


class PrivateFolder:
    """A folder only this user reads, for the socket and the engine's configuration.

    It holds a lock as long as its process lives, so that a later start knows which folders were left
    behind by a process that was killed, and removes those.
    """

    def __init__(self, parent: Path | None = None) -> None:
        """Raises CapacityError where no folder can be made."""
        base = parent or Path(tempfile.gettempdir())
        if parent is None and len(str(base)) > _MAX_FOLDER:
            base = Path("/tmp")
        _sweep(base)
        try:
            hidden = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}{os.getuid()}-", dir=base))  # mode 0700
            self._lock = os.open(hidden / "lock", os.O_CREAT | os.O_RDWR, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            self.path = hidden.rename(base / hidden.name[1:])  # swept only from now on, when it is locked
        except OSError as error:
            raise CapacityError(
                f"cannot make a folder for the engine's socket in {base}: {error.strerror}; free space there, "
                "or name another with TMPDIR"
            ) from error

    def remove(self) -> None:
        """Delete the folder. Safe to call twice."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _sweep(base: Path) -> None:
    """Remove this user's folders whose processes are gone."""
    for folder in base.glob(f"{_PREFIX}{os.getuid()}-*"):
        try:
            lock = os.open(folder / "lock", os.O_RDWR)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            pass  # its process lives
        finally:
            os.close(lock)


class EngineProcess:
    """One engine process. It ends itself when the pipe that this process holds is closed, however that is."""

    def __init__(self, folder: Path, command: Sequence[str] | None = None) -> None:
        """`command` stands for the engine in tests; it is called with the same arguments."""
        self.address = f"ipc://{folder / 'engine.sock'}"
        self._config_file = folder / "engine.msgpack"
        self._command = command or (sys.executable, "-P", "-m", "tokenspeed_core.engine.process")
        self._process: asyncio.subprocess.Process | None = None
        self._pipe = -1

    async def start(self, config: Mapping[str, Any], catalog_digest: str) -> None:
        """Start the engine. What it prints goes where this process prints."""
        payload = {
            "config": dict(config), "socket": self.address.removeprefix("ipc://"),
            "catalog_digest": catalog_digest,
        }
        data = msgpack.packb(payload)
        assert isinstance(data, bytes)
        self._config_file.write_bytes(data)
        theirs, self._pipe = os.pipe()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, str(self._config_file), "--parent-fd", str(theirs),
                stdin=subprocess.DEVNULL, pass_fds=(theirs,),
                start_new_session=True,  # Ctrl-C in the terminal is for this process, which drains
            )
        finally:
            os.close(theirs)

    @property
    def pid(self) -> int | None:
        """The engine's process id, once started."""
        return None if self._process is None else self._process.pid

    async def wait(self) -> str:
        """Wait for the engine's end and return how it ended, as part of a sentence."""
        assert self._process is not None
        code = await self._process.wait()
        if code >= 0:
            return f"exited with status {code}"
        name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
        hint = "; the system may have run out of memory" if -code == signal.SIGKILL else ""
        return f"was killed by {name}{hint}"

    async def stop(self, seconds: float = 5.0) -> None:
        """End the engine: by closing the pipe, then by force. Safe to call twice."""
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1
        if self._process is None or self._process.returncode is not None:
            return
        try:
            await asyncio.wait_for(self._process.wait(), seconds)
        except TimeoutError:
            self.kill()
            await self._process.wait()

    def kill(self) -> None:
        """End the engine at once."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
