"""How bodies of requests are read: only where they may be served, up to the cap, and the long ones off the loop."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from server_support import make_tokenizer
from tokenspeed_server import service as module
from tokenspeed_server.app import Routes
from tokenspeed_server.errors import ApiError
from tokenspeed_server.generate import read_body
from tokenspeed_server.protocol import CompletionRequest, parse
from tokenspeed_server.service import MAX_INLINE_BYTES, ModelText, Options, Service

from tokenspeed_core.commands.serving import Defaults, Ready, State

READY = Ready(2**30, 2**30, 2**31 - 1, "")
TEXT = ModelText(make_tokenizer(), None, Defaults())


class Link:
    """The client of an engine that is ready and gets no request."""

    state = State.READY


@contextmanager
def serving(is_open: bool = True) -> Iterator[Service]:
    """Return a service without an engine."""
    link: Any = Link()
    service = Service(Options("m"), link)
    if is_open:
        service.open(TEXT, READY)
    try:
        yield service
    finally:
        service.close()


class Body:
    """A body that comes in parts; remembers how many were read."""

    def __init__(self, *parts: bytes, between: Callable[[], None] = lambda: None) -> None:
        self.parts, self.between, self.num_read = parts, between, 0

    async def receive(self) -> dict[str, Any]:
        if self.num_read == len(self.parts):
            await asyncio.Event().wait()
        if self.num_read:
            self.between()
        self.num_read += 1
        more = self.num_read < len(self.parts)
        return {"type": "http.request", "body": self.parts[self.num_read - 1], "more_body": more}


async def ask(service: Service, body: Body) -> tuple[int, dict[str, Any]]:
    """Return the status and the JSON of an answer."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"method": "POST", "path": "/v1/completions", "headers": []}
    await Routes(service)(scope, body.receive, send)
    return sent[0]["status"], json.loads(sent[1]["body"])


@pytest.mark.parametrize("code", ["starting", "draining"])
def test_a_body_that_will_not_be_served_is_not_read(code: str) -> None:
    async def test() -> None:
        with serving(is_open=code == "draining") as service:
            service.is_draining = code == "draining"
            body = Body(b"{}")
            status, answer = await ask(service, body)
            assert (status, answer["error"]["code"], body.num_read) == (503, code, 0)

    asyncio.run(test())


def test_a_drain_waits_for_no_body_and_what_comes_during_it_is_refused() -> None:
    async def test() -> None:
        with serving() as service:

            def drain() -> None:
                assert service.num_active == 0
                service.is_draining = True

            status, answer = await ask(service, Body(b'{"prompt": ', b'"hello"}', between=drain))
            assert (status, answer["error"]["code"]) == (503, "draining")

    asyncio.run(test())


@pytest.mark.parametrize(("length", "num_read"), [("101", 0), ("", 2)])
def test_a_body_beyond_the_cap_is_not_read_on(length: str, num_read: int) -> None:
    headers = [(b"content-length", length.encode())] if length else []
    body = Body(b"x" * 100, b"x", b"x")
    with pytest.raises(ApiError, match="larger than the 100 bytes") as caught:
        asyncio.run(read_body({"headers": headers}, body.receive, 100))
    assert caught.value.status == 413
    assert body.num_read == num_read


def test_long_bodies_are_parsed_and_encoded_off_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[str] = []

    def noted(name: str, work: Any) -> Any:
        def run(*arguments: Any, **options: Any) -> Any:
            threads.append(f"{name}: {threading.current_thread().name.partition('_')[0]}")
            return work(*arguments, **options)

        return run

    monkeypatch.setattr(module, "parse", noted("parse", parse))
    monkeypatch.setattr(module, "encode", noted("encode", module.encode))

    async def test() -> None:
        with serving() as service:
            for length in (1, MAX_INLINE_BYTES):
                await service.read(CompletionRequest, json.dumps({"prompt": "x" * length}).encode())

    asyncio.run(test())
    assert threads == ["parse: MainThread", "encode: MainThread", "parse: text", "encode: text"]
