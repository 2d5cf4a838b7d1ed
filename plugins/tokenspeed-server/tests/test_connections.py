"""Connections end when a client sends too slowly, too much, or does not read."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn
from tokenspeed_server.connections import (
    LINGER_SECONDS,
    MAX_HEADERS,
    MIN_CHUNKS,
    Connection,
    ConnectionLimits,
)
from uvicorn.server import ServerState

HEAD = b"POST / HTTP/1.1\r\nhost: x\r\n"
GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[Any]]


class Server:
    """Connections to an application that reads each body and answers with its length."""

    def __init__(
        self,
        limits: ConnectionLimits,
        answer: bytes | None = None,
        *,
        answers_early: bool = False,  # without reading the body
    ) -> None:
        self.state = ServerState()
        self.answer = answer
        self.answers_early = answers_early
        self.num_disconnected = 0
        self._config = uvicorn.Config(
            self.app,
            interface="asgi3",
            lifespan="off",
            log_config=None,
            ws="none",
            h11_max_incomplete_event_size=limits.max_header_bytes,
        )
        self._config.load()
        self._limits = limits

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        size, more = 0, not self.answers_early
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.num_disconnected += 1
                return
            size += len(message["body"])
            more = message["more_body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        body = str(size).encode() if self.answer is None else self.answer
        await send({"type": "http.response.body", "body": body})

    def make(self) -> Connection:
        return Connection(
            config=self._config, server_state=self.state, app_state={}, limits=self._limits
        )


def talk(server: Server, *talks: Talk) -> list[Any]:
    """Hold conversations with a server at the same time; return their results."""

    async def run() -> list[Any]:
        listening = await asyncio.get_running_loop().create_server(server.make, "127.0.0.1", 0)
        port = listening.sockets[0].getsockname()[1]

        async def hold(each: Talk) -> Any:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                return await asyncio.wait_for(each(reader, writer), 60)
            finally:
                writer.close()

        try:
            return await asyncio.gather(*map(hold, talks))
        finally:
            listening.close()

    return asyncio.run(run())


def sends(data: bytes) -> Talk:
    """Return a talk that sends bytes and returns those received until the server closes."""

    async def run(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(data)
        try:
            return await reader.read()
        except ConnectionError:
            return b""

    return run


def status(answer: bytes) -> int:
    """Return the status of an answer."""
    return int(answer.split(b" ", 2)[1])


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (b"", b""),
        (b"GET / HTTP/1.1\r\nho", b"408"),
        (HEAD + b"content-length: 5\r\n\r\nab", b"408"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\nab", b"408"),
        (GET + b"GET /", b"408"),
    ],
)
def test_half_sent_request_ends_after_its_deadline(sent: bytes, expected: bytes) -> None:
    server = Server(ConnectionLimits(receive_timeout=0.2))
    (answer,) = talk(server, sends(sent))
    assert expected in answer
    assert not server.state.connections


def test_deadline_does_not_start_again_with_each_byte() -> None:
    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
        writer.write(HEAD + b"content-length: 100000\r\n\r\n")
        num_sent = 0
        while not reader.at_eof() and not writer.is_closing():
            writer.write(b"x")
            num_sent += 1
            await asyncio.sleep(0.01)
            if reader._buffer:  # type: ignore[attr-defined]
                break
        return num_sent

    server = Server(ConnectionLimits(receive_timeout=0.3))
    (num_sent,) = talk(server, drip)
    assert num_sent < 1000


def test_kept_connection_and_slow_answers_have_no_deadline() -> None:
    async def run(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> list[int]:
        found = []
        for _ in range(3):
            writer.write(HEAD + b"content-length: 2\r\n\r\nab")
            found.append(status(await reader.readuntil(b"\r\n\r\n")))
            await reader.readexactly(len(b"1\r\n2\r\n0\r\n\r\n"))
            await asyncio.sleep(0.3)
        return found

    server = Server(ConnectionLimits(receive_timeout=0.2))
    assert talk(server, run) == [[200, 200, 200]]


def test_body_in_tiny_chunks_is_refused_early() -> None:
    head = HEAD + b"transfer-encoding: chunked\r\n\r\n"
    server = Server(ConnectionLimits())
    started = time.process_time()
    (answer,) = talk(server, sends(head + b"1\r\nx\r\n" * 200_000))
    assert answer == b"" or status(answer) == 400
    assert time.process_time() - started < 1.0
    few = head + b"1\r\nx\r\n" * (MIN_CHUNKS // 2) + b"0\r\n\r\n"
    (answer,) = talk(server, sends(few + b"GARBAGE\r\n\r\n"))
    assert status(answer) == 200


@pytest.mark.parametrize("answers_early", [False, True])
@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nhost: x\r\nfoo bar\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
        HEAD + b"content-length: 1\r\ncontent-length: 2\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\naXX",
    ],
)
def test_malformed_request_is_refused_in_one_line(
    sent: bytes, answers_early: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    server = Server(ConnectionLimits(), answers_early=answers_early)
    (answer,) = talk(server, sends(sent))
    assert status(answer) == 400
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "malformed_request"
    (line,) = caplog.messages
    assert line.startswith("malformed request 400: ")


def test_malformed_body_after_the_answer_leaves_no_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def run(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
        writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n")
        found = status(await reader.readuntil(b"\r\n"))
        writer.write(b"zz\r\n")
        await reader.read()
        return found

    assert talk(Server(ConnectionLimits(), answers_early=True), run) == [200]
    assert not [record for record in caplog.records if record.levelname != "INFO"]


@pytest.mark.parametrize("protocol", [b"websocket", b"h2c"])
def test_other_protocols_are_not_offered(protocol: bytes, caplog: pytest.LogCaptureFixture) -> None:
    upgrade = b"connection: upgrade, close\r\nupgrade: " + protocol + b"\r\n\r\n"
    (answer,) = talk(Server(ConnectionLimits()), sends(b"GET / HTTP/1.1\r\nhost: x\r\n" + upgrade))
    assert status(answer) == 200
    # A line for the request is fine: an earlier test of the process may have turned it on.
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * (MAX_HEADERS + 1) + b"\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\na: " + b"b" * 100_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 100_000,
    ],
)
def test_long_head_is_refused(head: bytes) -> None:
    (answer,) = talk(Server(ConnectionLimits()), sends(head))
    assert answer == b"" or status(answer) == 431


@pytest.mark.parametrize(
    ("version", "expected"), [(b"1.0", 200), (b"1.1", 200), (b"2.0", 505), (b"0.9", 505)]
)
def test_other_major_versions_are_refused(version: bytes, expected: int) -> None:
    head = b"GET / HTTP/" + version + b"\r\nhost: x\r\nconnection: close\r\n\r\n"
    (answer,) = talk(Server(ConnectionLimits()), sends(head))
    assert status(answer) == expected


def test_full_server_drops_idle_connections_first() -> None:
    async def idle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(b"GET / HT")
        try:
            return await asyncio.wait_for(reader.read(), 1.0)
        except (ConnectionError, TimeoutError):
            return b""

    async def asks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
        await asyncio.sleep(0.3)
        writer.write(GET)
        return status(await reader.readuntil(b"\r\n"))

    server = Server(ConnectionLimits(max_connections=5))
    answers = talk(server, *[idle] * 5, *[asks] * 3)
    assert answers[5:] == [200] * 3


def test_server_of_working_connections_refuses_more() -> None:
    async def run(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> list[int]:
        writer.write(GET)  # its answer is too long to be sent before it is read
        found = [status(await reader.readuntil(b"\r\n"))]
        other, other_writer = await asyncio.open_connection(*writer.get_extra_info("peername"))
        found.append(status(await other.readuntil(b"\r\n")))
        other_writer.close()
        return found

    server = Server(ConnectionLimits(max_connections=1), answer=b"x" * 50_000_000)
    assert talk(server, run) == [[200, 503]]


def test_client_that_does_not_read_is_dropped() -> None:
    async def sleeps(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GET)
        while server.state.connections:
            await asyncio.sleep(0.02)

    server = Server(ConnectionLimits(send_timeout=0.2), answer=b"x" * 50_000_000)
    talk(server, sleeps)
    assert not server.state.tasks


def test_client_that_reads_slowly_keeps_its_connection() -> None:
    async def reads(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
        writer.write(GET + b"GARBAGE\r\n\r\n")
        size = 0
        while chunk := await reader.read(200_000):
            size += len(chunk)
            await asyncio.sleep(0.005)
        return size

    server = Server(ConnectionLimits(send_timeout=0.2), answer=b"x" * 10_000_000)
    assert talk(server, reads)[0] > 10_000_000


def test_pipelined_requests_are_bounded() -> None:
    async def run(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
        writer.write(GET * 3)
        await reader.readuntil(b"\r\n")
        writer.write(GET * 50_000)
        try:
            return len(await reader.read())
        except ConnectionError:
            return 0

    assert talk(Server(ConnectionLimits()), run)
    assert ConnectionLimits().receive_timeout > LINGER_SECONDS
