"""Chat templates, rendered in a separate process with limits of time and memory.

A template is a program that comes with the checkpoint. In a process it can be ended whatever it does:
a loop without output, or one that allocates without end, costs its own request and nothing else.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from queue import Empty, LifoQueue
from typing import IO, Any

from tokenspeed_core.commands.templates import (
    MAX_RENDER_SECONDS,
    ChatTemplate,
    RequestFailedError,
    TemplateError,
    describe_error,
)

MAX_MEMORY = 2**30  # bytes of address space of a process
MAX_PROCESSES = 2
START_SECONDS = 60.0
END_SECONDS = 5.0  # for the end of a process that has closed its pipe
PIPE_BYTES = 2**20
_HEAD = 8  # bytes of a message's length
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")

log = logging.getLogger("tokenspeed.text")


class IsolatedTemplate(ChatTemplate):
    """A chat template that renders in another process. Thread-safe; call `close` at the end."""

    def __init__(
        self,
        template: ChatTemplate,
        *,
        max_seconds: float = MAX_RENDER_SECONDS,
        max_memory: int = MAX_MEMORY,
    ) -> None:
        """Start the first process. It compiles the template when it renders."""
        self.__dict__.update(template.__dict__)
        self._max_seconds = max_seconds
        limits = {"max_seconds": max_seconds, "max_memory": max_memory}
        self._setup = {**template.definition(), **limits}
        self._idle: LifoQueue[_Renderer | None] = LifoQueue()
        for _ in range(MAX_PROCESSES - 1):
            self._idle.put(None)  # started when two requests render at the same time
        self._idle.put(_Renderer(self._setup))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the text of the prompt.

        Raises TemplateError, also if the template exceeds its limits, and RequestFailedError if the process is
        killed or cannot start, in two attempts.
        """
        arguments = [messages, tools, options, add_generation_prompt]
        try:
            data = json.dumps(arguments, ensure_ascii=False).encode("utf-8", "surrogatepass")
        except (TypeError, ValueError, RecursionError) as error:
            raise TemplateError(f"the messages cannot be rendered: {error}") from error
        answer = self._ask(data) or self._ask(data)
        if answer is None:
            raise RequestFailedError(
                "unavailable", "the subprocess of the chat template ended; try again"
            )
        text, failure = answer
        if failure:
            raise TemplateError(failure)
        return text

    def _ask(self, data: bytes) -> tuple[str, str] | None:
        """Return the text and the error; None if the process was killed or cannot start. Raises TemplateError."""
        renderer = self._idle.get()
        try:
            renderer = renderer or _Renderer(self._setup)
            return renderer.ask(data, self._max_seconds + 1.0)
        except (OSError, EOFError) as error:
            ended, renderer = renderer, None
            if ended is None:
                log.error("the subprocess of the chat template failed to start: %s", error)
                return None
            status = ended.end(0.0 if isinstance(error, TimeoutError) else END_SECONDS)
            if status in (-signal.SIGKILL, -signal.SIGTERM):
                log.error("the subprocess of the chat template was killed by signal %d", -status)
                return None
            raise TemplateError(
                f"the chat template exceeds its limits of {self._max_seconds:g} s and "
                f"{self._setup['max_memory'] // 2**20} MiB"
            ) from None
        finally:
            self._idle.put(renderer)

    def close(self) -> None:
        """End the processes that are idle; `render` starts others. All end with this process."""
        idle: list[_Renderer | None] = []
        with suppress(Empty):
            while True:
                idle.append(self._idle.get_nowait())
        for renderer in idle:
            if renderer is not None:
                renderer.end()
            self._idle.put(None)


class _Renderer:
    """A process that renders."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **_ONE_THREAD},
            start_new_session=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._to, self._from = self._process.stdin.fileno(), self._process.stdout.fileno()
        for pipe in (self._to, self._from):
            with suppress(OSError):  # the system bounds the sizes of all pipes of a user
                fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        os.set_blocking(self._to, False)
        os.set_blocking(self._from, False)
        self._unsent = _message(json.dumps(setup).encode())
        self._is_new = True

    def ask(self, data: bytes, seconds: float) -> tuple[str, str]:
        """Return the rendered text and the error. Raises OSError, EOFError or TimeoutError."""
        deadline = time.monotonic() + seconds + (START_SECONDS if self._is_new else 0.0)
        self._is_new = False
        unsent = memoryview(self._unsent + _message(data))
        self._unsent = b""
        received = bytearray()
        poll = select.poll()
        poll.register(self._from, select.POLLIN)
        poll.register(self._to, select.POLLOUT)
        while not _is_whole(received):
            for descriptor, event in poll.poll(max(0.0, deadline - time.monotonic()) * 1e3):
                if descriptor == self._to:
                    unsent = unsent[os.write(self._to, unsent[:PIPE_BYTES]) :]
                    if not unsent:
                        poll.unregister(self._to)
                elif event & (select.POLLIN | select.POLLHUP):
                    part = os.read(self._from, PIPE_BYTES)
                    if not part:
                        raise EOFError
                    received += part
            if time.monotonic() > deadline:
                raise TimeoutError
        text, error = json.loads(bytes(received[_HEAD:]).decode("utf-8", "surrogatepass"))
        return text, error

    def end(self, seconds: float = 0.0) -> int | None:
        """Wait up to `seconds` for the process's own end, else kill it. Return its own exit status, if it has one."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        status = self._process.returncode
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        return status


def _message(data: bytes) -> bytes:
    return len(data).to_bytes(_HEAD, "big") + data


def _is_whole(received: bytearray) -> bool:
    return len(received) >= _HEAD and len(received) - _HEAD == int.from_bytes(
        received[:_HEAD], "big"
    )


def main() -> None:
    """Render requests from the standard input until it ends."""
    reading, writing = sys.stdin.buffer, sys.stdout.buffer
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the server may still drain
    setup = json.loads(_read(reading))
    _limit(setup.pop("max_memory"))
    max_seconds = setup.pop("max_seconds")
    template: ChatTemplate | None = None
    while True:
        messages, tools, options, add_generation_prompt = json.loads(
            _read(reading).decode("utf-8", "surrogatepass")
        )
        text, error = "", ""
        # The default action of this signal ends the process, even if nothing reads its output any more.
        signal.setitimer(signal.ITIMER_REAL, max_seconds)
        try:
            template = template or ChatTemplate(**setup)
            text = template.render(
                messages, tools, options, add_generation_prompt=add_generation_prompt
            )
        except TemplateError as failure:
            error = str(failure)
        except MemoryError:
            error = "the chat template exceeds its limit of memory"
        except Exception as failure:  # of a template or filter: an error of the request
            error = f"the chat template fails: {describe_error(failure)}"
        signal.setitimer(signal.ITIMER_REAL, 0)
        answer = json.dumps([text, error], ensure_ascii=False).encode("utf-8", "surrogatepass")
        writing.write(_message(answer))
        writing.flush()


def _read(file: IO[bytes]) -> bytes:
    """Return the next message. Ends the process at the end of the file."""
    head = file.read(_HEAD)
    if len(head) < _HEAD:
        sys.exit(0)
    return file.read(int.from_bytes(head, "big"))


def _limit(max_memory: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (max_memory, max_memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


if __name__ == "__main__":
    main()
