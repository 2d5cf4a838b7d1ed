"""The gate stands before everything, plugins' middleware too, and answers for what breaks behind it."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from tokenspeed_server.app import Gate


async def wide_open(scope: Any, receive: Any, send: Any) -> None:
    """A plugin's middleware with a route of its own."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"secret"})


async def broken(scope: Any, receive: Any, send: Any) -> None:
    raise ZeroDivisionError


async def leaving(scope: Any, receive: Any, send: Any) -> None:
    raise SystemExit("no licence")


def get(app: Any, path: str = "/x", **headers: str) -> httpx.Response:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.get(path, headers=headers)

    return asyncio.run(ask())


def test_middleware_of_plugins_is_behind_the_key() -> None:
    gate = Gate(wide_open, "k")
    assert get(gate).status_code == 401
    assert get(gate, authorization="Bearer k").text == "secret"


def test_what_breaks_is_a_500_that_tells_nothing_of_the_inside(
    caplog: pytest.LogCaptureFixture,
) -> None:
    response = get(Gate(broken, None))
    assert response.status_code == 500
    assert "ZeroDivision" not in response.text
    assert "ZeroDivision" in caplog.text


def test_middleware_that_would_end_the_process_ends_its_request_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert get(Gate(leaving, None)).json()["error"]["message"].endswith("its log says why")
    assert "GET /x failed: no licence" in caplog.text


def test_what_breaks_in_the_middle_of_an_answer_begins_no_second_one() -> None:
    sent: list[str] = []

    async def breaks_off(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ZeroDivisionError

    async def send(message: Any) -> None:
        sent.append(message["type"])

    with pytest.raises(ZeroDivisionError):
        asyncio.run(
            Gate(breaks_off, None)({"method": "GET", "path": "/x", "headers": []}, None, send)
        )  # type: ignore[arg-type]
    assert sent == ["http.response.start"]
