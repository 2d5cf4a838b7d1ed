"""Starts a worker process on this machine, copies its log, and reports its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from tokenspeed_core.api.executors import Settings, WorkerExit
from tokenspeed_core.engine.subprocesses import Program, describe_end, start_with_log_pipe

WORKER_MODULE = "tokenspeed_core.worker.process"  # run as `python -m`, this is a rank
MAX_LINES = 20  # of the log, kept for the message about a failed rank
DRAIN_SECONDS = 0.5  # for the rest of the log; a child of the worker may keep the pipe open


class WorkerProcess:
    """Starts a worker process, copies its log to stderr, and reports its end."""

    def __init__(self, settings: Settings, on_exit: Callable[[WorkerExit], None]) -> None:
        """Start the process. `on_exit` is called once, from another thread."""
        self._settings = settings
        self._on_exit = on_exit
        self._lines: deque[str] = deque(maxlen=MAX_LINES)
        self._child: subprocess.Popen[bytes] | None = None
        self._pipe = -1
        self._lock = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="worker", daemon=True)
        self._thread.start()

    def close(self, seconds: float) -> None:
        """Close the worker's pipe, and kill the worker if it does not exit within `seconds`. Can be called twice."""
        with self._lock:
            self._is_closed = True
            pipe, self._pipe = self._pipe, -1
        if pipe >= 0:
            os.close(pipe)
        self._thread.join(seconds)
        if self._thread.is_alive() and self._child is not None:
            with suppress(ProcessLookupError):
                self._child.send_signal(signal.SIGKILL)
            self._thread.join()

    def _run(self) -> None:
        # Linux signals the death of a parent when the thread that started the child ends. This thread outlives the
        # child.
        rank = int(self._settings["rank"])
        with self._lock:
            if self._is_closed:
                return
            command = (sys.executable, "-P", "-m", WORKER_MODULE)
            try:
                self._child, self._pipe = start_with_log_pipe(Program(command, self._settings))
            except OSError as error:
                self._on_exit(WorkerExit(rank, f"could not start: {error}", ()))
                return
        reader = threading.Thread(target=self._copy_log, name="worker-log", daemon=True)
        reader.start()
        code = self._child.wait()
        reader.join(DRAIN_SECONDS)
        self._on_exit(WorkerExit(rank, describe_end(code), tuple(self._lines)))

    def _copy_log(self) -> None:
        assert self._child is not None and self._child.stdout is not None
        with self._child.stdout as log:
            for line in log:
                self._lines.append(line.decode(errors="replace").rstrip())
                with suppress(OSError):  # the disk of a log may be full, and stderr closed
                    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, line)
