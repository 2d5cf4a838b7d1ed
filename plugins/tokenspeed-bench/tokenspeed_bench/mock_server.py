"""A server that streams canned events at a fixed rate, to measure the client itself."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tokenspeed_bench.client import LoadOptions, run
from tokenspeed_bench.connection import Target
from tokenspeed_bench.metrics import of_records
from tokenspeed_bench.signals import child_processes, ignore_signals
from tokenspeed_bench.traffic import load

BEAT = 5e-3  # seconds between a stream's events
IN_LEN, OUT_LEN = 128, 200
MAX_USERS = 1024
START_SECONDS = 10.0

EVENT = (
    b'data: {"id":"cmpl-0123456789abcdef","object":"text_completion","created":1,"model":"m","choices":'
    b'[{"index":0,"text":" w12345","logprobs":null,"finish_reason":null}]}\n\n'
)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)


def chunk(data: bytes) -> bytes:
    """Return data as an HTTP/1.1 chunk."""
    return b"%x\r\n%s\r\n" % (len(data), data)


ONE_EVENT = chunk(EVENT)


def ending(num_tokens: int) -> bytes:
    """Return the end of a stream, with its usage."""
    usage = b'data: {"choices":[],"usage":{"completion_tokens":%d}}\n\n' % num_tokens
    return chunk(usage) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class Connection(asyncio.Protocol):
    """A client's connection, which is in `live` while it has a request."""

    def __init__(self, live: set[Connection]) -> None:
        self.live = live
        self.received = b""
        self.num_tokens = self.num_left = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self.live.discard(self)

    def data_received(self, data: bytes) -> None:
        self.received += data
        head, separator, body = self.received.partition(b"\r\n\r\n")
        length = LENGTH.search(head)
        if not separator or length is None or len(body) < int(length[1]):
            return
        self.received = b""
        self.num_left = self.num_tokens = json.loads(body)["max_tokens"]
        self.transport.write(HEAD)
        self.live.add(self)

    def beat(self) -> None:
        """Send one event, and the end of the stream after the last one."""
        self.num_left -= 1
        if self.num_left:
            self.transport.write(ONE_EVENT)
        else:
            self.transport.write(ONE_EVENT + ending(self.num_tokens))
            self.live.discard(self)


async def serve(listening: socket.socket, seconds: float, parent: int) -> None:
    """Send an event to every live connection at a fixed interval, until the parent process ends."""
    live: set[Connection] = set()
    await asyncio.get_running_loop().create_server(lambda: Connection(live), sock=listening)
    due = time.perf_counter()
    while os.getppid() == parent:
        due = max(due + seconds, time.perf_counter())
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        for connection in list(live):
            connection.beat()


def bind(port: int) -> socket.socket:
    """Return a socket on a port that several processes share; port 0 takes a free one."""
    # asyncio turns Nagle's delay off only for sockets that say they are TCP
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    bound.bind(("127.0.0.1", port))
    return bound


def _process(port: int, seconds: float, parent: int) -> None:
    ignore_signals()
    listening = bind(port)
    listening.listen(1024)
    asyncio.run(serve(listening, seconds, parent))


@contextmanager
def mock_server(num_procs: int, seconds: float) -> Iterator[str]:
    """Run a server that sends an event per stream every `seconds`; yield its URL."""
    context = multiprocessing.get_context("fork")
    with bind(0) as reserved:
        port: int = reserved.getsockname()[1]
        servers = [
            context.Process(target=_process, args=(port, seconds, os.getpid()), daemon=True)
            for _ in range(num_procs)
        ]
        with child_processes(servers):
            _wait_until_open(port)
            yield f"http://127.0.0.1:{port}"


def _wait_until_open(port: int) -> None:
    end = time.monotonic() + START_SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)
        else:
            return


def client_cost(pace: LoadOptions) -> dict[str, Any]:
    """Return the event rate and gaps that the client measures against the mock server.

    The difference to the fixed interval is the cost of the client and the machine. Ctrl-C raises
    KeyboardInterrupt.
    """
    users = min(pace.users, MAX_USERS)
    traffic = load(users, IN_LEN, OUT_LEN, is_fixed=True)
    with mock_server(max(1, min(pace.procs // 2, users)), BEAT) as url:
        answers = run(Target(url, "m"), traffic.sessions, LoadOptions(users, None, pace.procs))
    if answers.is_interrupted:
        raise KeyboardInterrupt
    figures = of_records(answers.records, {})
    return {
        "users": users,
        "beat_ms": 1e3 * BEAT,
        "events_per_s": figures["events_per_s"],
        "itl_p99_ms": figures["itl_p99_ms"],
    }
