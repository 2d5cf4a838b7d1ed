"""Run `tokenspeed serve` with the demo in a subprocess."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil

COMMAND = (sys.executable, "-P", "-m", "tokenspeed_core.cli")
DEMO: dict[str, Any] = {"model": "demo", "temperature": 0}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of a subprocess: one thread, temporary files in `folder`."""
    return {**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}


def make_client(**settings: Any) -> httpx.Client:
    """Return an HTTP client that does not read the system's certificates, which takes 30 ms."""
    return httpx.Client(trust_env=False, timeout=60, verify=False, **settings)


@dataclass(frozen=True)
class Served:
    """A running server, and the curl command that it printed."""

    url: str
    curl: str
    process: subprocess.Popen[str]
    folder: Path

    def http(self, **headers: str) -> httpx.Client:
        """Return an HTTP client."""
        return make_client(base_url=self.url, headers=headers)

    def openai(self, api_key: str = "any") -> openai.OpenAI:
        """Return the unmodified openai client."""
        return openai.OpenAI(
            base_url=f"{self.url}/v1",
            api_key=api_key,
            max_retries=0,
            http_client=make_client(),
        )

    def engine(self) -> psutil.Process:
        """Return the engine's process."""
        return engine_of(self.process.pid)

    def stderr(self) -> str:
        """Return the output on stderr so far."""
        return (self.folder / "stderr").read_text()

    def sockets(self) -> list[Path]:
        """Return the folders with sockets."""
        return [*self.folder.glob("tokenspeed-*"), *self.folder.glob(".tokenspeed-*")]


def engine_of(pid: int) -> psutil.Process:
    """Return the engine's process of a server."""
    children = psutil.Process(pid).children()
    return next(child for child in children if "tokenspeed_core.engine.process" in child.cmdline())


def ranks_of(engine: psutil.Process) -> list[psutil.Process]:
    """Return the processes of an engine's ranks, without rank 0."""
    children = engine.children(recursive=True)
    return [child for child in children if "tokenspeed_core.worker.process" in child.cmdline()]


def wait_for_work(engine: psutil.Process) -> None:
    """Wait until an idle engine has a request, by its CPU time."""
    before = sum(engine.cpu_times()[:2])
    wait_until(lambda: sum(engine.cpu_times()[:2]) > before + 0.05, 30, "at work")


@contextmanager
def served(folder: Path, *flags: str) -> Iterator[Served]:
    """Run a server for a block; yield it when it serves."""
    with (folder / "stderr").open("w") as errors:
        process = subprocess.Popen(
            [*COMMAND, "serve", "--port", "0", *flags],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment(folder),
        )
    assert process.stdout is not None
    try:
        line, curl = process.stdout.readline(), process.stdout.readline()
        found = re.search(r"at (http://\S+)", line)
        assert found, f"{line!r}, status {process.poll()}: {(folder / 'stderr').read_text()}"
        yield Served(found[1], curl.strip(), process, folder)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def run_command(
    folder: Path, *arguments: str, environ: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Run a command; return its exit status and its stderr without progress lines."""
    done = subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
        env={**environment(folder), **(environ or {})},
        check=False,
    )
    return done.returncode, "".join(
        line for line in done.stderr.splitlines(True) if line != "weights ...\n"
    )


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Wait for a condition. Raises AssertionError after a timeout."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not {what} after {seconds} s"
        time.sleep(0.05)


def wait_until_idle(processes: list[psutil.Process]) -> None:
    """Wait for a second in which the processes together use less than 20 ms of CPU time."""

    def spent() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    def is_idle() -> bool:
        before = spent()
        time.sleep(1)
        return spent() - before < 0.02

    wait_until(is_idle, 60, "idle")


def has_ended(process: psutil.Process) -> bool:
    """Say whether a process has ended; its parent may not have asked for the exit status yet."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class Background:
    """Calls a function in a thread."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._result: Any = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._call()
        except Exception as error:  # returned by `result`
            self._result = error

    def result(self, seconds: float = 60) -> Any:
        """Return the result of the call, or the exception that it raised."""
        self._thread.join(seconds)
        assert not self._thread.is_alive(), f"still running after {seconds} s"
        return self._result
