"""The application without a socket: the API key, middleware of plugins, and unexpected errors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tokenspeed_server.app import create_app
from tokenspeed_server.service import Options, Service

from tokenspeed_core.commands.serving import FinishReason, ModelText, Ready, State


class Engine:
    """The client of an engine that answers every request with two tokens."""

    state = State.READY

    def take_ids(self, count: int) -> int:
        return 1

    def submit(self, request: Any, sinks: Any) -> None:
        call_soon = asyncio.get_running_loop().call_soon
        call_soon(sinks[0].take, [5], FinishReason.NOT, 0, None)
        call_soon(call_soon, sinks[0].take, [6], FinishReason.LENGTH, 0, None)

    def abort(self, sequence_ids: Any) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture
def service() -> Iterator[Service]:
    async def make() -> Service:
        engine: Any = Engine()
        return Service(Options("m", api_key="k"), engine)

    service = asyncio.run(make())
    yield service
    service.close()


async def with_own_route(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"secret"})


async def failing(scope: Any, receive: Any, send: Any) -> None:
    raise ZeroDivisionError


async def exiting(scope: Any, receive: Any, send: Any) -> None:
    raise SystemExit("no licence")


def get(app: Any, path: str = "/x", key: str = "k") -> httpx.Response:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.get(path, headers={"authorization": f"Bearer {key}"})

    return asyncio.run(ask())


def test_middleware_of_plugins_is_behind_the_key(service: Service) -> None:
    app = create_app(service, lambda app: with_own_route)
    assert get(app, key="wrong").status_code == 401
    assert get(app).text == "secret"


@pytest.mark.parametrize("middleware", [failing, exiting])
def test_unexpected_error_is_a_500_without_details(service: Service, middleware: Any) -> None:
    response = get(create_app(service, lambda app: middleware))
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    assert "ZeroDivision" not in response.text
    assert "licence" not in response.text


def test_late_error_sends_no_second_answer(service: Service) -> None:
    sent: list[str] = []

    async def breaks_off(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ZeroDivisionError

    async def send(message: Any) -> None:
        sent.append(message["type"])

    scope = {
        "type": "http",
        "method": "GET",
        "path": "/x",
        "headers": [(b"authorization", b"Bearer k")],
    }
    app = create_app(service, lambda app: breaks_off)
    with pytest.raises(ZeroDivisionError):
        asyncio.run(app(scope, None, send))  # type: ignore[arg-type]
    assert sent == ["http.response.start"]


def test_middleware_of_plugins_sees_every_event(service: Service) -> None:
    seen: list[bytes] = []

    def wrap(app: Any) -> Any:
        async def wrapped(scope: Any, receive: Any, send: Any) -> None:
            async def recording_send(message: Any) -> None:
                seen.append(message.get("body", b""))
                await send(message)

            await app(scope, receive, recording_send)

        return wrapped

    async def ask() -> bytes:
        service.open(ModelText(None, None), Ready(64, 64, 64, "{}"))
        app = create_app(service, wrap)
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app), base_url="http://test"
        ) as client:
            body = {"prompt": [1, 2], "stream": True}
            headers = {"authorization": "Bearer k"}
            response = await client.post("/v1/completions", json=body, headers=headers)
            return response.content

    content = asyncio.run(ask())
    assert b"".join(seen) == content
    assert content.endswith(b"data: [DONE]\n\n")


def test_openapi_describes_bodies_with_their_bounds(service: Service) -> None:
    described = create_app(service).openapi()
    schemas = described["components"]["schemas"]
    for path, name in (
        ("/v1/completions", "CompletionRequest"),
        ("/v1/chat/completions", "ChatRequest"),
    ):
        body = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        assert body["schema"]["$ref"].endswith(f"/{name}")
        number, null = schemas[name]["properties"]["n"]["anyOf"]
        assert (number["minimum"], number["maximum"]) == (1, 128)
        assert null == {"type": "null"}
    assert "prompt" in schemas["CompletionRequest"]["required"]
    assert schemas["Message"]["properties"]["role"]["enum"]
    assert get(create_app(service), "/openapi.json").json() == described
    assert {"TokenizeRequest", "DetokenizeRequest"} <= schemas.keys()


def test_api_page_loads_nothing_from_other_sites(service: Service) -> None:
    page = get(create_app(service), "/docs")
    assert page.status_code == 200
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "//" not in page.text.replace("</", ""), "an address of another site, or a comment"
