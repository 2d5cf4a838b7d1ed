"""A server that streams canned events on a fixed beat: what `http_load.py` itself costs."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import socket
import time

EVENT = (
    b'data: {"id":"cmpl-0123456789abcdef","object":"text_completion","created":1,"model":"m","choices":'
    b'[{"index":0,"text":" w12345","logprobs":null,"finish_reason":null}]}\n\n'
)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)


def chunk(data: bytes) -> bytes:
    """Return data as a chunk of HTTP/1.1."""
    return b"%x\r\n%s\r\n" % (len(data), data)


ONE_EVENT = chunk(EVENT)


def ending(num_tokens: int) -> bytes:
    """Return the end of a stream, with its usage."""
    usage = b'data: {"choices":[],"usage":{"completion_tokens":%d}}\n\n' % num_tokens
    return chunk(usage) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class Connection(asyncio.Protocol):
    """A client's connection; while it has a request, it is among the live ones."""

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
        """Send one event, and the end after the last."""
        self.num_left -= 1
        if self.num_left:
            self.transport.write(ONE_EVENT)
        else:
            self.transport.write(ONE_EVENT + ending(self.num_tokens))
            self.live.discard(self)


async def serve(port: int, seconds: float) -> None:
    """Serve until killed, an event to every live connection each beat."""
    # asyncio turns Nagle's delay off only for sockets that say they are TCP
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # the processes share the port
    listening.bind(("127.0.0.1", port))
    listening.listen(1024)
    live: set[Connection] = set()
    await asyncio.get_running_loop().create_server(lambda: Connection(live), sock=listening)
    due = time.perf_counter()
    while True:
        due = max(due + seconds, time.perf_counter())
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        for connection in list(live):
            connection.beat()


def main() -> None:
    """Fork the processes and serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("procs", type=int)
    parser.add_argument("beat_ms", type=float)
    arguments = parser.parse_args()
    for _ in range(arguments.procs - 1):
        if os.fork() == 0:
            break
    asyncio.run(serve(arguments.port, arguments.beat_ms / 1e3))


if __name__ == "__main__":
    main()
