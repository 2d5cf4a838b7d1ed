"""A small OpenAI-like server. Tests provide the function that answers each request."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

Answer = Callable[["Exchange"], Awaitable[None]]
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


@dataclass
class Exchange:
    """One request and the connection that it came over."""

    writer: asyncio.StreamWriter
    headers: dict[str, str]
    body: dict[str, Any]
    number: int  # 0 for the first request

    def chunk(self, data: bytes) -> None:
        self.writer.write(b"%x\r\n%s\r\n" % (len(data), data))

    def event(self, value: Any) -> None:
        self.chunk(b"data: " + json.dumps(value).encode() + b"\n\n")

    def refuse(self, status: str, message: str) -> None:
        body = json.dumps({"error": {"message": message}}).encode()
        self.writer.write(
            f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
        )

    async def tokens(self, num: int, gap: float = 0.0) -> None:
        for i in range(num):
            self.event({"choices": [{"index": 0, "text": f" w{i}", "finish_reason": None}]})
            await asyncio.sleep(gap)

    def end(self, num: int, **usage: Any) -> None:
        counts = {"prompt_tokens": len(self.body["prompt"]), "completion_tokens": num, **usage}
        self.event({"choices": [], "usage": counts})
        self.chunk(b"data: [DONE]\n\n")
        self.writer.write(b"0\r\n\r\n")


async def good(exchange: Exchange) -> None:
    """Answer with the requested number of tokens. Half of the prompt counts as cached."""
    num = exchange.body["max_tokens"]
    exchange.writer.write(STREAM)
    await exchange.tokens(num, 0.002)
    exchange.end(num, prompt_tokens_details={"cached_tokens": len(exchange.body["prompt"]) // 2})


@dataclass
class Fake:
    """A running fake server and the requests that it received."""

    url: str = ""
    exchanges: list[Exchange] = field(default_factory=list)
    metrics: Callable[[int], str] | None = None  # the page after a number of requests


async def _serve(
    fake: Fake, answer: Answer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            lines = head.split("\r\n")
            headers = {
                name.lower(): value.strip()
                for name, _, value in (line.partition(":") for line in lines[1:])
            }
            body = json.loads(
                await reader.readexactly(int(headers.get("content-length", 0))) or b"{}"
            )
            if lines[0].startswith("GET"):
                page = json.dumps({"data": [{"id": "fake"}]}).encode()
                missing = "/v1/models" not in lines[0]
                if "/metrics" in lines[0] and fake.metrics is not None:
                    page, missing = fake.metrics(len(fake.exchanges)).encode(), False
                status = "404 Not Found" if missing else "200 OK"
                writer.write(
                    f"HTTP/1.1 {status}\r\ncontent-length: {len(page)}\r\n\r\n".encode() + page
                )
                continue
            exchange = Exchange(writer, headers, body, len(fake.exchanges))
            fake.exchanges.append(exchange)
            await answer(exchange)
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


@contextmanager
def serving(answer: Answer) -> Iterator[Fake]:
    """Run a server in a thread until the block ends."""
    fake, loop, is_up = Fake(), asyncio.new_event_loop(), threading.Event()

    async def main() -> None:
        server = await asyncio.start_server(lambda r, w: _serve(fake, answer, r, w), "127.0.0.1", 0)
        fake.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        is_up.set()
        await stop.wait()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        server.close()

    stop = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(main()), daemon=True)
    thread.start()
    assert is_up.wait(60)
    try:
        yield fake
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(60)
        loop.close()
