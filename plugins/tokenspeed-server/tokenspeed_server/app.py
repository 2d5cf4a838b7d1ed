"""The FastAPI application: middleware, error handlers and the OpenAPI description."""

from __future__ import annotations

from collections.abc import Callable
from hmac import compare_digest
from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import Response
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

import tokenspeed_core
from tokenspeed_core.commands.serving import BadRequestError, RequestFailedError
from tokenspeed_server.errors import ApiError
from tokenspeed_server.protocol import ChatRequest, CompletionRequest
from tokenspeed_server.responses import DIRECT_SEND
from tokenspeed_server.routes import router
from tokenspeed_server.service import Service

Wrap = Callable[[ASGIApp], ASGIApp]


class ErrorBody(BaseModel):
    """What went wrong. `param` is the wrong field, if there is one."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """An error in OpenAI's shape."""

    error: ErrorBody


class ApiKeyMiddleware:
    """Refuses requests without the key, on unknown routes and those of plugins' middleware too."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._expected = f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on if it has the key or asks for /health."""
        given = Headers(scope=scope).get("authorization", "").encode("latin-1")
        if scope["path"] == "/health" or compare_digest(given, self._expected):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401,
            "missing or wrong API key: send it as 'Authorization: Bearer KEY'",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )
        await _respond(error)(scope, receive, send)


class App(FastAPI):
    """The application. It gives responses the `send` without the wrappers of the framework.

    Each wrapper would cost a third of a microsecond per token; `GenerationResponse` uses this
    `send` for what follows the start of a response.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        scope[DIRECT_SEND] = send
        await super().__call__(scope, receive, send)


class PluginMiddleware:
    """Runs the middleware of plugins; one that would end the process fails its request instead."""

    def __init__(self, app: ASGIApp, wrap: Wrap) -> None:
        async def inner(scope: Scope, receive: Receive, send: Send) -> None:
            scope[DIRECT_SEND] = send  # so that plugins see all messages
            await app(scope, receive, send)

        wrapped = wrap(inner)
        self._app = app if wrapped is inner else wrapped

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        try:
            await self._app(scope, receive, send)
        except SystemExit as error:
            raise RuntimeError(f"plugin middleware raised SystemExit: {error}") from error


def create_app(service: Service, wrap: Wrap | None = None) -> App:
    """Return the application. `wrap` adds the middleware of plugins."""
    app = App(
        title="TokenSpeed",
        version=tokenspeed_core.__version__,
        docs_url=None,  # these pages load scripts from another site
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.service = service
    app.include_router(router)
    if wrap is not None:
        app.add_middleware(PluginMiddleware, wrap=wrap)
    if service.options.api_key is not None:
        app.add_middleware(ApiKeyMiddleware, api_key=service.options.api_key)
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(BadRequestError, _on_bad_request)
    app.add_exception_handler(RequestFailedError, _on_request_failed)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_unexpected)
    # Errors of plugins are raised here, at start.
    app.middleware_stack = app.build_middleware_stack()
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


def _respond(error: ApiError) -> Response:
    return Response(error.body(), error.status, error.headers, "application/json")


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _respond(error)


async def _on_bad_request(request: Request, error: Exception) -> Response:
    assert isinstance(error, BadRequestError)
    return _respond(ApiError(400, error.message, error.param, error.code))


async def _on_request_failed(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestFailedError)
    return _respond(ApiError.of(error))


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Answer an unknown route, a wrong method, or an error of the framework."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 405:
        allowed = (error.headers or {})["Allow"]
        return _respond(ApiError(405, f"{path} takes {allowed} only", headers={"allow": allowed}))
    message = f"no route {path}" if error.status_code == 404 else str(error.detail)
    return _respond(ApiError(error.status_code, message))


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # the client is gone


async def _on_unexpected(request: Request, error: Exception) -> Response:
    """Answer with a 500; uvicorn logs the traceback."""
    return _respond(ApiError(500, "the request failed; see the server log"))


def _openapi(app: App) -> dict[str, Any]:
    """Return the OpenAPI description of the routes, with the request bodies that dependencies parse."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        components = schema.setdefault("components", {}).setdefault("schemas", {})
        for model in (CompletionRequest, ChatRequest, Error):
            described = model.model_json_schema(ref_template="#/components/schemas/{model}")
            components.update(described.pop("$defs", {}))
            components[model.__name__] = described
        bearer = {"type": "http", "scheme": "bearer"}
        schema["components"]["securitySchemes"] = {"api_key": bearer}
        schema["security"] = [{"api_key": []}, {}]
        app.openapi_schema = schema
    return app.openapi_schema
