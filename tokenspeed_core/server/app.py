"""The ASGI application: one gate before every route, the hot routes by hand, the rest in FastAPI."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable
from hmac import compare_digest
from typing import Any

import fastapi
from fastapi.responses import Response
from starlette.exceptions import HTTPException

import tokenspeed_core
from tokenspeed_core.server.errors import ApiError
from tokenspeed_core.server.generate import Receive, Scope, Send, encode_headers, generate, header, send_error
from tokenspeed_core.server.protocol import ChatRequest, CompletionRequest
from tokenspeed_core.server.schema import add_generating_routes
from tokenspeed_core.server.service import Body, Service

_HOT: dict[str, type[Body]] = {"/v1/completions": CompletionRequest, "/v1/chat/completions": ChatRequest}
_OPEN = "/health"  # the one route that needs no key: load balancers have none

AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

log = logging.getLogger(__name__)


class Gate:
    """The outermost layer: checks the key on every route, known or not, and answers for what breaks inside."""

    def __init__(self, inner: AsgiApp, api_key: str | None) -> None:
        self._inner = inner
        self._expected = None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection event of ASGI."""
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            return
        if scope["path"] != _OPEN and not self._is_allowed(scope):
            error = ApiError(
                401, "missing or wrong API key: send it as 'Authorization: Bearer KEY'", code="invalid_api_key",
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
        except Exception:  # a bug in one request must not reach the others, and its client must be told
            log.exception("%s %s failed", scope["method"], scope["path"])
            if has_begun:
                raise
            await send_error(send, ApiError(500, "the server failed on this request; its log says why"))

    def _is_allowed(self, scope: Scope) -> bool:
        return self._expected is None or compare_digest(header(scope, b"authorization"), self._expected)


class Routes:
    """The two hot routes in bare ASGI, and everything else in FastAPI."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._cold = cold_app(service)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        path = scope["path"]
        if path not in _HOT:
            await self._cold(scope, receive, send)
        elif scope["method"] != "POST":
            await send_error(send, ApiError(405, f"{path} takes POST only", headers={"allow": "POST"}))
        else:
            await generate(self._service, _HOT[path], scope, receive, send)


def cold_app(service: Service) -> fastapi.FastAPI:
    """Return the routes that nobody calls often."""
    app = fastapi.FastAPI(
        title="TokenSpeed", version=tokenspeed_core.__version__, docs_url=None, redoc_url=None
    )
    name = service.options.model_name

    @app.get("/health", responses={503: {"description": "not ready, or stuck"}})
    async def health() -> Response:
        reason = service.why_unhealthy()
        status = {"status": "ok"} if reason is None else {"status": "unhealthy", "reason": reason}
        return _json(status, 200 if reason is None else 503)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": tokenspeed_core.__version__}

    @app.get("/v1/models")
    async def models() -> Response:
        return _json({"object": "list", "data": [_model(service)]})

    @app.get("/v1/models/{model_id:path}", responses={404: {"description": "no such model"}})
    async def model(model_id: str) -> Response:
        if model_id != name:
            raise ApiError(
                404, f"the model {model_id!r} does not exist; available: {name!r}", "model", "model_not_found"
            )
        return _json(_model(service))

    @app.get("/v1/plugins", responses={503: {"description": "the engine is starting"}})
    async def plugins() -> Response:
        if service.serving is None:
            raise ApiError(503, "the engine is starting", headers={"retry-after": "1"})
        return Response(service.serving.report, media_type="application/json")

    @app.exception_handler(ApiError)
    async def on_api_error(request: fastapi.Request, error: ApiError) -> Response:
        return _error(error)

    @app.exception_handler(HTTPException)
    async def on_http_error(request: fastapi.Request, error: HTTPException) -> Response:
        message = f"no route {request.url.path}" if error.status_code == 404 else str(error.detail)
        return _error(ApiError(error.status_code, message, headers=error.headers))

    add_generating_routes(app)
    return app


def _model(service: Service) -> dict[str, Any]:
    length = None if service.serving is None else service.serving.limits.longest
    return {
        "id": service.options.model_name, "object": "model", "created": 0, "owned_by": "tokenspeed",
        "max_model_len": length,
    }


def _json(value: Any, status: int = 200) -> Response:
    return Response(json.dumps(value), status, media_type="application/json")


def _error(error: ApiError) -> Response:
    response = Response(error.body(), error.status, media_type="application/json")
    response.raw_headers.extend(encode_headers(error.headers))
    return response
