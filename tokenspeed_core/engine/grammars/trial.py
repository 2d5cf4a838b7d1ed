"""Compiles each grammar in a subprocess first, so that a hostile grammar can end only the subprocess."""

from __future__ import annotations

import json
import select
import subprocess
import sys
from typing import Any

from tokenspeed_core.api.grammars import GrammarError
from tokenspeed_core.errors import TokenSpeedError

SECONDS = 5.0  # to compile a grammar and to fill its first mask
MAX_BYTES = 1 << 30  # for that, in addition to the memory after the start
START_SECONDS = 120.0  # to import the backend and to index the vocabulary
_MODULE = "tokenspeed_core.engine.grammars.trial_process"


class Trial:
    """A subprocess that compiles grammars. It starts on first use, and again after a grammar ended it."""

    def __init__(
        self, settings: dict[str, Any], seconds: float = SECONDS, max_bytes: int = MAX_BYTES
    ) -> None:
        """`settings` are those of `GrammarBackend.to_wire`."""
        self._settings = {**settings, "seconds": seconds, "max_bytes": max_bytes}
        self._seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None

    def check(self, kind: str, text: str) -> None:
        """Raise GrammarError if a grammar is invalid or exceeds a limit, TokenSpeedError if the process fails."""
        if self._process is None:
            self._start()
        line = self._ask({"kind": kind, "text": text}, self._seconds + 2)
        if line is None:
            self.close()
            raise GrammarError(
                f"compiling the grammar took more than {self._seconds:g} s or too much memory; simplify it"
            )
        error = json.loads(line)
        if error is not None:
            raise GrammarError(error)

    def close(self) -> None:
        """End the process. Safe to call twice."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", _MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        if self._ask(self._settings, START_SECONDS) is None:
            self.close()
            raise TokenSpeedError("the subprocess that compiles grammars ended during its start")

    def _ask(self, message: dict[str, Any], seconds: float) -> bytes | None:
        """Send a line and return the answer, None if there is none."""
        assert self._process is not None
        pipe, answers = self._process.stdin, self._process.stdout
        assert pipe is not None
        assert answers is not None
        try:
            data = memoryview(json.dumps(message).encode() + b"\n")
            while data:
                data = data[pipe.write(data) :]
        except BrokenPipeError:
            return None
        line = b""
        while not line.endswith(b"\n"):
            if not select.select([answers], [], [], seconds)[0]:
                return None
            part = answers.read(65536)
            if not part:
                return None
            line += part
        return line
