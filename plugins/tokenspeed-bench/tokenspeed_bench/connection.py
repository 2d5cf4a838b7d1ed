"""The HTTP connection of one simulated user: streamed completions over bare asyncio.

It parses no JSON per token. It counts events and records their arrival times, so that one process
can follow about 50,000 events per second. `mock_server.py` measures the cost of the client itself.
"""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import SplitResult, urlsplit

from tokenspeed_bench.metrics import Record

LAST_CHUNK = b"0\r\n\r\n"
EVENTS = (b"data: {", b"data:{")
ERROR = re.compile(rb'data: ?\{ ?"error": ?(.{0,400})', re.DOTALL)
LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
NO_CHOICE = re.compile(rb'"choices": ?\[\]')
COUNTS = {
    name: re.compile(rb'"%s": ?(\d+)' % name.encode())
    for name in ("completion_tokens", "prompt_tokens", "cached_tokens")
}
KEEP = 1500  # last bytes of the stream to keep, which contain its usage
SEAM = len(EVENTS[0]) - 1
MAX_OF_A_REFUSAL = 2000


class RequestFailed(Exception):
    """A request without an answer. The message describes the server's reaction."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server: URL without `/v1`, model name, bearer key, and timeout per request.

    Requests share cached prefixes only with equal `salt`. None sends no salt.
    """

    url: str
    model: str
    key: str | None = None
    timeout: float = 600.0  # seconds
    salt: str | None = None

    def parts(self) -> SplitResult:
        """Return the parts of the URL."""
        return urlsplit(self.url)

    def head(self) -> bytes:
        """Return the request head, with a placeholder for the content length."""
        key = f"Authorization: Bearer {self.key}\r\n" if self.key else ""
        parts = self.parts()
        return (
            f"POST {parts.path.rstrip('/')}/v1/completions HTTP/1.1\r\nHost: {parts.netloc.rpartition('@')[2]}\r\n{key}"
            "Content-Type: application/json\r\nContent-Length: "
        ).encode() + b"%d\r\n\r\n"

    def body(self, prompt: bytes, out_len: int) -> bytes:
        """Return a request body for `out_len` tokens after a prompt, given as JSON token ids."""
        fields = json.dumps(
            {
                "model": self.model,
                "max_tokens": out_len,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
                **({"cache_salt": self.salt} if self.salt else {}),
            }
        ).encode()
        return fields[:-1] + b', "prompt": [' + prompt + b"]}"


@dataclass(eq=False)
class Wire(asyncio.Protocol):
    """A connection. `answer` is the future of the current request."""

    transport: asyncio.Transport | None = None
    answer: asyncio.Future[Record] | None = None
    head: bytes = b""  # of the answer, as far as it came; only kept until its status is known
    is_stream: bool = False  # the status was 200
    tail: bytes = b""
    events: list[float] = field(default_factory=list)
    sent: float = 0.0
    num_asked: int = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def is_open(self) -> bool:
        """Return whether another request can be sent."""
        return self.transport is not None and not self.transport.is_closing()

    def has_answer_bytes(self) -> bool:
        """Return whether any part of the answer arrived."""
        return self.is_stream or bool(self.head)

    def connection_lost(self, error: Exception | None) -> None:
        if self.answer is None or self.answer.done():
            return
        if (
            self.is_stream and b"data: [DONE]" in self.tail
        ):  # a server that ends an answer by closing
            self._end(time.perf_counter())
        elif self.head:
            self.answer.set_exception(_refusal(self.head))
        else:
            why = f": {error}" if error is not None else ""
            so_far = f" after {len(self.events)} events" if self.events else " without an answer"
            self.answer.set_exception(
                RequestFailed(f"the server closed the connection{so_far}{why}")
            )

    def ask(self, data: bytes) -> asyncio.Future[Record]:
        """Send a request and return the future of its answer."""
        assert self.transport is not None
        self.answer = asyncio.get_running_loop().create_future()
        self.head, self.tail, self.events, self.is_stream = b"", b"", [], False
        self.num_asked += 1
        self.sent = time.perf_counter()
        self.transport.write(data)
        return self.answer

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self.answer is None or self.answer.done():
            return
        if not self.is_stream:
            data = self._read_status(data)
            if not self.is_stream:
                return
        before = self.tail[-SEAM:]  # a mark may be cut between two reads
        seam = before + data
        self.events += [now] * sum(seam.count(mark) - before.count(mark) for mark in EVENTS)
        self.tail = (self.tail + data)[-KEEP:]
        if self.tail.endswith(LAST_CHUNK) and b"data: [DONE]" in self.tail:
            self._end(now)

    def _read_status(self, data: bytes) -> bytes:
        """Read the response head. Return the bytes after it if the status is 200."""
        self.head += data
        head, separator, body = self.head.partition(b"\r\n\r\n")
        if not separator:
            return b""
        if head.split(b" ", 2)[1:2] == [b"200"]:
            self.is_stream, self.head = True, b""
            return body
        length = LENGTH.search(head)
        if length is None or len(body) >= min(int(length[1]), MAX_OF_A_REFUSAL):
            assert self.answer is not None
            self.answer.set_exception(_refusal(self.head))
        return b""

    def _end(self, now: float) -> None:
        assert self.answer is not None
        error = ERROR.search(self.tail)
        if error is not None:
            self.answer.set_exception(
                RequestFailed(f"the stream ended in an error: {_message(error[1])}")
            )
            return
        counts = {name: _last(pattern, self.tail) for name, pattern in COUNTS.items()}
        events = (
            self.events[:-1] if NO_CHOICE.search(self.tail) else self.events
        )  # the last has the usage, no text
        if not events:
            self.answer.set_exception(RequestFailed("the stream ended without a token"))
            return
        num_tokens = counts["completion_tokens"]
        num_prompt, num_cached = counts["prompt_tokens"], counts["cached_tokens"]
        self.answer.set_result(
            Record(
                self.sent,
                events,
                len(events) if num_tokens is None else num_tokens,
                now,
                num_prompt,
                num_cached,
            )
        )


async def connect(target: Target) -> Wire:
    """Open a connection. Raises RequestFailed."""
    parts = target.parts()
    secure = ssl.create_default_context() if parts.scheme == "https" else None
    port = parts.port or (443 if secure else 80)
    try:
        _, wire = await asyncio.get_running_loop().create_connection(
            Wire, parts.hostname or "127.0.0.1", port, ssl=secure
        )
    except OSError as error:
        raise RequestFailed(f"no connection to {target.url}: {error}") from error
    return wire


class User:
    """Sends requests one after another and reuses the connection."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._wire: Wire | None = None

    async def ask(self, data: bytes) -> Record:
        """Send a request and return its record. Raises RequestFailed."""
        wire = (
            self._wire
            if self._wire is not None and self._wire.is_open()
            else await connect(self._target)
        )
        self._wire = wire
        try:
            async with asyncio.timeout(
                self._target.timeout
            ):  # in 3.11, wait_for may lose a cancellation
                return await wire.ask(data)
        except TimeoutError as error:
            self.close()
            so_far = f"received {len(wire.events)} events" if wire.events else "received nothing"
            raise RequestFailed(f"timeout after {self._target.timeout:g} s; {so_far}") from error
        except RequestFailed:
            self.close()
            if wire.num_asked == 1 or wire.has_answer_bytes():
                raise
        return await self.ask(data)  # the server had closed a connection that was idle

    def close(self) -> None:
        """Close the connection and abandon the current request."""
        if self._wire is not None and self._wire.transport is not None:
            self._wire.transport.close()
        self._wire = None


def message_of(answer: object) -> str | None:
    """Return the message of an error in OpenAI's format, or None."""
    error = answer.get("error") if isinstance(answer, Mapping) else None
    message = error.get("message") if isinstance(error, Mapping) else error
    return str(message) if message else None


def _refusal(answer: bytes) -> RequestFailed:
    head, _, body = answer.partition(b"\r\n\r\n")
    status = head.partition(b"\r\n")[0].decode(errors="replace").partition(" ")[2] or "no status"
    try:
        message = message_of(json.loads(body))
    except ValueError:
        message = None
    return RequestFailed(f"{status}: {message or body[:300].decode(errors='replace').strip()}")


def _message(body: bytes) -> str:
    found = re.search(rb'"message": ?"((?:[^"\\]|\\.)*)', body)
    return (found[1] if found else body).decode(errors="replace").strip()


def _last(pattern: re.Pattern[bytes], text: bytes) -> int | None:
    found = pattern.findall(text)
    return int(found[-1]) if found else None
