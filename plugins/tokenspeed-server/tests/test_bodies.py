"""How bodies are read: only if the request would be admitted, within the limit, long ones in a thread."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from server_support import make_tokenizer
from tokenspeed_server import admission, routes
from tokenspeed_server.app import create_app
from tokenspeed_server.errors import ApiError
from tokenspeed_server.service import Options, Service

from tokenspeed_core.commands.serving import ModelText, Ready, State


class Engine:
    """The client of an engine that is ready and gets no request."""

    state = State.READY

    def close(self) -> None:
        pass


@contextmanager
def serving(*, is_open: bool = True) -> Iterator[Service]:
    """Return a service without an engine, which takes bodies of 5,000 bytes."""
    engine: Any = Engine()
    service = Service(Options("m", max_body_bytes=5000), engine)
    if is_open:
        text = ModelText(make_tokenizer(), None)
        service.open(text, Ready(2**30, 2**30, 400, ""))
    try:
        yield service
    finally:
        service.close()


class Body:
    """A body that arrives in parts and counts how many were read."""

    def __init__(self, *parts: bytes, between: Callable[[], None] = lambda: None) -> None:
        self.parts = parts
        self.between = between
        self.num_read = 0

    async def receive(self) -> dict[str, Any]:
        if self.num_read == len(self.parts):
            await asyncio.Event().wait()
        if self.num_read:
            self.between()
        self.num_read += 1
        more = self.num_read < len(self.parts)
        return {"type": "http.request", "body": self.parts[self.num_read - 1], "more_body": more}


async def ask(service: Service, body: Body, length: bytes = b"") -> tuple[int, dict[str, Any]]:
    """Return the status and the error of an answer."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": [(b"content-length", length)] if length else [],
    }
    await create_app(service)(scope, body.receive, send)
    return sent[0]["status"], json.loads(sent[1]["body"])["error"]


@pytest.mark.parametrize("code", ["starting", "draining"])
def test_body_of_a_refused_request_is_not_read(code: str) -> None:
    async def test() -> None:
        with serving(is_open=code == "draining") as service:
            service.is_draining = code == "draining"
            body = Body(b"{}")
            status, error = await ask(service, body)
            assert (status, error["code"], body.num_read) == (503, code, 0)

    asyncio.run(test())


def test_drain_does_not_wait_for_unread_bodies() -> None:
    async def test() -> None:
        with serving() as service:

            def drain() -> None:
                assert service.num_active == 0
                service.is_draining = True

            status, error = await ask(service, Body(b'{"prompt": ', b'"hello"}', between=drain))
            assert (status, error["code"]) == (503, "draining")

    asyncio.run(test())


@pytest.mark.parametrize(("length", "num_read"), [(b"5001", 0), (b"", 2)])
def test_oversized_body_is_not_read_whole(length: bytes, num_read: int) -> None:
    async def test() -> None:
        with serving() as service:
            body = Body(b"x" * 5000, b"x", b"x")
            status, error = await ask(service, body, length)
            assert (status, error["code"], body.num_read) == (413, "too_large", num_read)

    asyncio.run(test())


def test_long_bodies_are_parsed_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []

    def note(*arguments: Any) -> None:
        threads.append(threading.current_thread().name.partition("_")[0])
        raise ApiError(400, "parsed")

    monkeypatch.setattr(routes, "parse_request", note)

    async def test() -> None:
        with serving() as service:
            for length in (1, admission.MAX_INLINE_BYTES + 1):
                assert (await ask(service, Body(b"x" * length)))[0] == 400

    asyncio.run(test())
    assert threads == ["MainThread", "text"]
