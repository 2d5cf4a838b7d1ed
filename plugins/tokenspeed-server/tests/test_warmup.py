"""The server's warm-up: it takes the path of a client's request, and clients do not see it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tokenspeed_server import asgi, warmup
from tokenspeed_server.service import Options

from tokenspeed_core.commands.serving import ModelText


def test_warm_up_answers_without_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    statuses: list[int] = []
    post = asgi.post

    async def recording(app: Any, path: str, body: bytes, **options: Any) -> asgi.Answer:
        async def inner(scope: Any, receive: Any, send: Any) -> None:
            async def noting(message: Any) -> None:
                if message["type"] == "http.response.start":
                    statuses.append(message["status"])
                await send(message)

            await app(scope, receive, noting)

        return await post(inner, path, body, **options)

    monkeypatch.setattr(asgi, "post", recording)
    records: list[Any] = []
    options = Options("demo", observers=(records.append,), api_key="secret")
    text = ModelText(None, None)
    asyncio.run(asyncio.wait_for(warmup.warm_up(options, text), 30))
    assert statuses == [200, 200]
    assert records == []
