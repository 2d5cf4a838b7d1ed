"""The measured server: a running one, or one started for the measurement."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPException
from typing import IO, Any

from tokenspeed_bench import supervised
from tokenspeed_bench.connection import message_of
from tokenspeed_bench.console import warn
from tokenspeed_bench.errors import BenchError
from tokenspeed_bench.progress import Progress

MAX_SECONDS = 600.0  # from the command to /ready
STOP_SECONDS = 60.0  # that a server has to stop
POLL_SECONDS = 0.05
NUM_LINES = 15  # last lines of a server's output to show when it fails
OUR_POLL = '"GET /ready '


class Api:
    """The non-streaming routes of an OpenAI-compatible server."""

    def __init__(self, url: str, key: str | None = None) -> None:
        with_scheme = url if "://" in url else f"http://{url}"
        if not with_scheme.startswith(("http://", "https://")):
            raise BenchError(f"--url {url}: must begin with http:// or https://")
        self.url = with_scheme.rstrip("/").removesuffix("/v1")
        self.key = key
        self._direct = urllib.request.build_opener(
            urllib.request.ProxyHandler({})
        )  # the load bypasses proxies too

    def _open(self, path: str, timeout: float) -> Any:
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        request = urllib.request.Request(self.url + path, None, headers)
        return self._direct.open(request, timeout=timeout)

    def text(self, path: str, timeout: float = 30.0) -> str | None:
        """Return a route's text, None if the server does not answer with 200."""
        try:
            with self._open(path, timeout) as got:
                body: bytes = got.read()
        except (OSError, HTTPException):
            return None
        return body.decode(errors="replace")

    def get(self, path: str, timeout: float = 30.0) -> Any:
        """Return a route's JSON. Raises BenchError."""
        try:
            with self._open(path, timeout) as got:
                return json.load(got)
        except urllib.error.HTTPError as error:
            with error:
                raise BenchError(
                    f"{self.url}{path}: {error.code} {_error_message(error.read())}"
                ) from error
        except (OSError, HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise BenchError(
                f"{self.url}{path}: {reason}. Is the server running? Start one with `tokenspeed serve`."
            ) from error

    def model(self) -> str:
        """Return the name of the first served model. Raises BenchError."""
        answer = self.get("/v1/models")
        data = answer.get("data") if isinstance(answer, dict) else None
        if (
            not isinstance(data, list)
            or not data
            or not isinstance(data[0], dict)
            or "id" not in data[0]
        ):
            raise BenchError(f"{self.url}/v1/models lists no model; set --model-name")
        return str(data[0]["id"])

    def report(self) -> dict[str, Any]:
        """Return the plugins and kernels of a TokenSpeed server; empty for another server."""
        try:
            answer = self.get("/v1/plugins")
        except BenchError:
            return {}
        return answer if isinstance(answer, dict) else {}

    def is_healthy(self) -> bool:
        """Return whether `/ready` answers with 200."""
        try:
            with self._direct.open(f"{self.url}/ready", timeout=5):
                return True
        except (OSError, HTTPException):
            return False


@contextmanager
def started(
    arguments: Sequence[str], key: str | None, environ: Mapping[str, str] | None = None
) -> Iterator[tuple[Api, float]]:
    """Start `tokenspeed serve` on a free port; yield it and the seconds until `/ready`; stop it at the end.

    `environ` is added to the environment. Raises BenchError with the server's last lines if it
    exits or does not become healthy in time.
    """
    api = Api(f"http://127.0.0.1:{_free_port()}", key)
    words = ["serve", *arguments, "--port", api.url.rpartition(":")[2]]
    more = {**(environ or {}), **({"TOKENSPEED_API_KEY": key} if key else {})}
    with tempfile.TemporaryFile() as log:  # has no name, so it is never left over
        begin = time.perf_counter()
        server = supervised.start(
            words,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **more},
            start_new_session=True,  # Ctrl-C stops the load; the server must still finish its answers
        )
        try:
            _wait_until_healthy(server, api, log)
            try:
                yield api, time.perf_counter() - begin
            finally:
                if server.poll() is not None:
                    warn(f"the server {_ended(server, log)}")
        finally:
            _stop(server)


def _wait_until_healthy(server: subprocess.Popen[bytes], api: Api, log: IO[bytes]) -> None:
    begin = time.monotonic()
    with Progress() as progress:
        while not api.is_healthy():
            seconds = time.monotonic() - begin
            if server.poll() is not None:
                raise BenchError(f"the server {_ended(server, log)}")
            if seconds > MAX_SECONDS:
                raise BenchError(
                    f"the server did not become healthy in {MAX_SECONDS:g} s. Its output:\n{_last_lines(log)}"
                )
            progress.say(f"starting the server: {seconds:.0f} of at most {MAX_SECONDS:.0f} s")
            time.sleep(POLL_SECONDS)


def _ended(server: subprocess.Popen[bytes], log: IO[bytes]) -> str:
    return f"ended with status {server.returncode}. Its output:\n{_last_lines(log)}"


def _last_lines(log: IO[bytes]) -> str:
    text = os.pread(
        log.fileno(), os.fstat(log.fileno()).st_size, 0
    )  # does not move the server's write position
    lines = text.decode(errors="replace").strip().splitlines()
    return "\n".join([line for line in lines if OUR_POLL not in line][-NUM_LINES:])


def _stop(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        with suppress(subprocess.TimeoutExpired):
            server.wait(STOP_SECONDS)
    finally:  # also after Ctrl-C; kill has no effect on a server that has ended
        server.kill()
        server.communicate()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _error_message(body: bytes) -> str:
    try:
        text = message_of(json.loads(body))
    except ValueError:
        text = None
    return text or body[:200].decode(errors="replace").strip()
