"""The ASGI application: one gate before every route, and the routes. `openapi.json` describes them."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable
from hmac import compare_digest
from importlib.resources import files
from typing import Any

import tokenspeed_core
from tokenspeed_server.errors import ApiError
from tokenspeed_server.generate import (
    Receive,
    Scope,
    Send,
    generate,
    header,
    send_error,
    send_json,
)
from tokenspeed_server.protocol import ChatRequest, CompletionRequest
from tokenspeed_server.service import Body, Service

_GENERATING: dict[str, type[Body]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
}
_OPEN = "/health"  # the one route that needs no key: load balancers have none

AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

log = logging.getLogger(__name__)


class Gate:
    """The outermost layer: checks the key on every route, known or not, and answers for what breaks inside."""

    def __init__(self, inner: AsgiApp, api_key: str | None) -> None:
        self._inner = inner
        self._expected = None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Nothing but HTTP comes here: the server has neither websockets nor a lifespan."""
        key = self._expected
        if (
            scope["path"] != _OPEN
            and key is not None
            and not compare_digest(header(scope, b"authorization"), key)
        ):
            error = ApiError(
                401,
                "missing or wrong API key: send it as 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
            await send_error(send, error)
            return
        has_begun = False

        async def noting_send(message: Any) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._inner(scope, receive, noting_send)
        except (
            Exception,
            SystemExit,
        ) as error:  # of one request, a plugin's too: no other is harmed, its client told
            log.exception("%s %s failed: %s", scope["method"], scope["path"], error)
            if has_begun:
                raise
            await send_error(
                send, ApiError(500, "the server failed on this request; its log says why")
            )


class Routes:
    """All routes: two that generate, and those that tell of the server."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        path = scope["path"]
        kind = _GENERATING.get(path)
        allowed = "GET" if kind is None else "POST"
        try:
            status, body = self._tell(path) if kind is None else (200, b"")
            if scope["method"] != allowed:
                raise ApiError(405, f"{path} takes {allowed} only", headers={"allow": allowed})
            if kind is None:
                await send_json(send, status, body, [])
            else:
                await generate(self._service, kind, scope, receive, send)
        except ApiError as error:
            await send_error(send, error)

    def _tell(self, path: str) -> tuple[int, bytes]:
        """Return the status and the JSON of a route that generates nothing. Raises ApiError."""
        service, name = self._service, self._service.options.model_name
        match path:
            case "/health":
                reason = service.why_unhealthy()
                state = (
                    {"status": "ok"}
                    if reason is None
                    else {"status": "unhealthy", "reason": reason}
                )
                return 200 if reason is None else 503, json.dumps(state).encode()
            case "/version":
                return 200, json.dumps({"version": tokenspeed_core.__version__}).encode()
            case "/openapi.json":
                return 200, files("tokenspeed_server").joinpath("openapi.json").read_bytes()
            case "/v1/plugins":
                if service.serving is None:
                    raise ApiError(503, "the engine is starting", headers={"retry-after": "1"})
                return 200, service.serving.limits.report.encode()
            case "/v1/models":
                return 200, json.dumps({"object": "list", "data": [self._model()]}).encode()
        if not path.startswith("/v1/models/"):
            raise ApiError(404, f"no route {path}")
        asked = path.removeprefix("/v1/models/")
        if asked != name:
            raise ApiError(
                404,
                f"the model {asked!r} does not exist; available: {name!r}",
                "model",
                "model_not_found",
            )
        return 200, json.dumps(self._model()).encode()

    def _model(self) -> dict[str, Any]:
        serving = self._service.serving
        return {
            "id": self._service.options.model_name,
            "object": "model",
            "created": 0,
            "owned_by": "tokenspeed",
            "max_model_len": None if serving is None else serving.limits.longest,
        }
