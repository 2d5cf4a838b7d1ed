"""`tokenspeed run-batch --url`: a running server answers, over connections that are used again."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from scripted import scripted
from tokenspeed_server.batch.http_client import HttpClient, ServerLostError
from tokenspeed_server.batch.online import OnlineBatch, check_server

from tokenspeed_core.cli import main
from tokenspeed_core.commands.serving import ConfigError

KEY = "secret"


def line(custom_id: str, url: str = "/v1/completions", **body: Any) -> bytes:
    value = {"custom_id": custom_id, "url": url, "body": body or {"prompt": "hello"}}
    return json.dumps(value).encode() + b"\n"


@asynccontextmanager
async def listening(*replies: str, **options: Any) -> AsyncIterator[str]:
    """Serve a scripted application on a free port."""
    with scripted(*replies, logs_exchanges=False, **options) as (app, _), socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        bound.listen()  # connections wait until the server accepts them
        config = uvicorn.Config(app, lifespan="off", log_config=None, http="h11")
        server = uvicorn.Server(config)
        server.capture_signals = nullcontext  # type: ignore[method-assign, assignment]
        task = asyncio.create_task(server.serve(sockets=[bound]))
        try:
            yield f"http://127.0.0.1:{bound.getsockname()[1]}"
        finally:
            server.should_exit = True
            await task


def answers(output: io.BytesIO) -> list[dict[str, Any]]:
    return [json.loads(each) for each in output.getvalue().splitlines()]


@pytest.mark.parametrize("suffix", ["", "/", "/v1"])
def test_server_answers_in_the_order_of_the_lines(suffix: str) -> None:
    async def run() -> list[dict[str, Any]]:
        lines = [line(str(i), prompt="x", max_tokens=1 + i % 7) for i in range(40)]
        lines += [b"nonsense\n", line("chat", "/v1/chat/completions", messages=[])]
        output = io.BytesIO()
        async with listening("hello " * 9, api_key=KEY) as url:
            batch = OnlineBatch(HttpClient(url + suffix, KEY), concurrency=5)
            assert await batch.run(io.BytesIO(b"".join(lines)), output)
        assert (batch.counts.num_answered, batch.counts.num_failed) == (40, 2)
        return answers(output)

    found = asyncio.run(run())
    assert [each["custom_id"] for each in found] == [*map(str, range(40)), None, "chat"]
    usages = [each["response"]["body"]["usage"]["completion_tokens"] for each in found[:40]]
    assert usages == [1 + i % 7 for i in range(40)]
    assert found[40]["error"]["code"] == "invalid_json"
    assert found[41]["response"]["status_code"] == 400
    assert all(each["response"]["request_id"] for each in found[:40])


@pytest.mark.parametrize("key", [None, "wrong"])
def test_wrong_key_is_refused_before_the_first_line(key: str | None) -> None:
    async def run() -> None:
        async with listening(api_key=KEY) as url:
            with pytest.raises(ConfigError, match="TOKENSPEED_API_KEY"):
                await check_server(HttpClient(url, key))
            await check_server(HttpClient(url, KEY))

    asyncio.run(run())


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
MODELS = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: keep-alive\r\n\r\n{}"


@asynccontextmanager
async def scenario(replies: list[list[bytes]]) -> AsyncIterator[tuple[str, list[int]]]:
    """Serve connections that send these bytes, one item after each request, and then close.

    Yields the URL and the number of requests of each connection.
    """
    counts: list[int] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = len(counts)
        counts.append(0)
        for reply in replies[min(number, len(replies) - 1)]:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
            counts[number] += 1
            writer.write(reply)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", counts


def ok(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


def test_closed_idle_connection_is_replaced() -> None:
    async def run() -> None:
        async with scenario([[ok(b"{}"), ok(b"1")], [ok(b"2"), ok(b"3")]]) as (url, counts):
            client = HttpClient(url)
            await client.get("/v1/models")
            bodies = [(await client.post("/x", b"{}")).body for _ in range(3)]
            await client.close()
        assert bodies == [b"1", b"2", b"3"]
        assert counts == [2, 2]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{\n  "id": "a\\n",\r\n  "n": 1\n}\n', {"id": "a\n", "n": 1}),
        (b"<h1>\n502 Bad Gateway</h1>", "<h1>\n502 Bad Gateway</h1>"),
        (b"", ""),
        (b"\xff", "\ufffd"),
    ],
)
def test_any_body_becomes_one_line_of_json(body: bytes, expected: object) -> None:
    async def run() -> list[dict[str, Any]]:
        output = io.BytesIO()
        async with scenario([[ok(body), ok(b"{}")]]) as (url, _):
            batch = OnlineBatch(HttpClient(url), concurrency=1)
            assert await batch.run(io.BytesIO(line("a") + line("b")), output)
        return answers(output)

    first, second = asyncio.run(run())
    assert first["response"]["body"] == expected
    assert second["response"]["body"] == {}


def test_timeout_of_a_connection_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    async def read(self: asyncio.StreamReader, n: int = -1) -> bytes:
        raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")

    async def run() -> None:
        async with scenario([[]]) as (url, _):
            monkeypatch.setattr(asyncio.StreamReader, "read", read)
            with pytest.raises(ServerLostError, match=url):
                await HttpClient(url).get("/v1/models")

    asyncio.run(run())


@pytest.mark.parametrize(
    ("url", "key"),
    [("http://höst", None), (f"http://{'a' * 64}", None), ("http://host", "schlüssel")],
)
def test_text_that_http_cannot_send_is_refused(url: str, key: str | None) -> None:
    with pytest.raises(ConfigError):
        HttpClient(url, key)


@pytest.mark.parametrize(
    "reply", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{", b"SSH-2.0\r\n\r\n"]
)
def test_lost_server_ends_the_run_and_keeps_results(reply: bytes) -> None:
    async def run() -> None:
        async with scenario([[ok(b"{}"), reply], [reply]]) as (url, _):
            batch, output = OnlineBatch(HttpClient(url), concurrency=1), io.BytesIO()
            with pytest.raises(ServerLostError, match=url):
                await batch.run(io.BytesIO(line("a") + line("b") + line("c")), output)
        assert [each["custom_id"] for each in answers(output)] == ["a"]

    asyncio.run(run())


def test_interrupt_keeps_finished_answers() -> None:
    class Writing(io.BytesIO):
        """Interrupts this process after the first result."""

        def write(self, data: Any) -> int:
            os.kill(os.getpid(), signal.SIGINT)
            return super().write(data)

    async def run() -> None:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(ok(b"{}"))
            await reader.read()  # never answers again
            writer.close()

        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        async with server:
            url = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
            batch, output = OnlineBatch(HttpClient(url), concurrency=1), Writing()
            assert not await batch.run(io.BytesIO(line("a") + line("b")), output)
            assert [each["custom_id"] for each in answers(output)] == ["a"]

    asyncio.run(run())


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
        return port


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--url", "ftp://here"], "ftp://here"),
        (["--url", "http://"], "--url"),
        (["--url", "127.0.0.1:8000", "MODEL"], "MODEL"),
        (["--url", "127.0.0.1:8000", "--max-num-seqs", "2"], "--url"),
        (["--concurrency", "2"], "--url"),
        (["--url", f"127.0.0.1:{free_port()}"], "tokenspeed serve"),
    ],
)
def test_wrong_options_and_addresses_are_refused(
    words: list[str],
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_bytes(line("a"))
    assert main(["run-batch", "in.jsonl", "out.jsonl", *words]) == 2
    error = capsys.readouterr().err
    assert named in error
    assert len(error.splitlines()) == 1
    assert not Path("out.jsonl").exists()
