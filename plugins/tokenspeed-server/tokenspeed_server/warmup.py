"""Requests without an engine before the server is ready, so that the first client's request is fast."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import replace
from typing import Any

from tokenspeed_core.commands.serving import EchoClient
from tokenspeed_server.app import create_app
from tokenspeed_server.service import ModelText, Options, Service

log = logging.getLogger(__name__)


async def warm_up(options: Options, text: ModelText) -> None:
    """Answer a completion and a chat, whole and streamed, on an app of its own.

    Observers, middleware and the engine see nothing of it. A request that fails is logged at debug
    level only: the same error will reach the client that causes it.
    """
    engine = EchoClient()
    service = Service(replace(options, observers=(), api_key=None), engine)
    service.open(text, engine.ready.result())
    app = create_app(service)
    requests: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": [0] if text.tokenizer is None else "Hello!"}
    }
    if text.template is not None:
        requests["/v1/chat/completions"] = {"messages": [{"role": "user", "content": "Hello!"}]}
    try:
        for path, body in requests.items():
            for stream in (False, True):
                try:
                    await _post(app, path, {**body, "stream": stream})
                except Exception:
                    log.debug("warm-up request to %s failed", path, exc_info=True)
    finally:
        service.close()
        engine.close()


async def _post(app: Any, path: str, body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    messages = [{"type": "http.request", "body": data, "more_body": False}]

    async def receive() -> Any:
        return messages.pop() if messages else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        return None

    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "scheme": "http",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "client": None,
        "server": ("127.0.0.1", 80),
    }
    await app(scope, receive, send)
