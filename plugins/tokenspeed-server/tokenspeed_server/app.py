"""The FastAPI application: middleware, error handlers and the OpenAPI description."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import tokenspeed_core
from tokenspeed_core.commands.serving import (
    BadRequestError,
    RequestFailedError,
    current_request_id,
)
from tokenspeed_server import numbers, pages, tokenization
from tokenspeed_server.access import AccessMiddleware
from tokenspeed_server.anthropic import errors as anthropic_errors
from tokenspeed_server.anthropic import protocol as anthropic_protocol
from tokenspeed_server.anthropic import routes as anthropic_routes
from tokenspeed_server.errors import ApiError
from tokenspeed_server.exchange import CLIENT_LEFT, PROBES, Exchange, set_reason
from tokenspeed_server.generation_response import DIRECT_SEND
from tokenspeed_server.openapi import openapi
from tokenspeed_server.protocol import ChatRequest, CompletionRequest
from tokenspeed_server.responses_api import routes as responses_routes
from tokenspeed_server.responses_api.protocol import ResponsesRequest
from tokenspeed_server.routes import router
from tokenspeed_server.service import Service
from tokenspeed_server.unknown_fields import HEADER

EXPOSED_HEADERS = ("x-request-id", "retry-after", HEADER.decode())
Wrap = Callable[[ASGIApp], ASGIApp]

BODIES = (
    CompletionRequest,
    ChatRequest,
    *anthropic_protocol.BODIES,
    ResponsesRequest,
    *tokenization.BODIES,
)
PUBLIC_PATHS = ("/health", "/ready", *pages.PAGE_PATHS)  # need no API key


class App(FastAPI):
    """The application. It logs each request, and adds the server's request id to each response.

    It gives responses the `send` without the wrappers of the framework. Each wrapper would cost a
    third of a microsecond per token; `GenerationResponse` uses this `send` for everything after the
    start of a response. Paths may have the prefix of a proxy, which is removed here, since some
    proxies remove it and others do not.
    """

    path_prefix = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, and log it."""
        scope[DIRECT_SEND] = send
        if self.path_prefix and scope["path"].startswith(self.path_prefix + "/"):
            scope["path"] = scope["path"].removeprefix(self.path_prefix)
        exchange = Exchange.begin(scope)
        current_request_id.set(exchange.request_id)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.start_response(message)
            await send(message)

        try:
            await super().__call__(scope, receive, send_with_id)
        finally:
            service: Service = self.state.service
            if service.options.logs_exchanges:
                exchange.log_end()
            if service.observability.worker is not None and exchange.path not in PROBES:
                service.observability.worker.observe_status(exchange.status)


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
    prefix = service.options.root_path
    app = App(
        title="TokenSpeed",
        servers=[{"url": prefix}] if prefix else None,
        version=tokenspeed_core.__version__,
        docs_url=None,  # these pages load scripts from another site
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.service = service
    app.path_prefix = prefix
    app.include_router(router)
    app.include_router(anthropic_routes.router)
    app.include_router(responses_routes.router)
    app.include_router(tokenization.router)
    app.include_router(pages.router)
    app.include_router(numbers.router)
    if wrap is not None:
        app.add_middleware(PluginMiddleware, wrap=wrap)
    app.add_middleware(
        AccessMiddleware, access=service.options.access, public=PUBLIC_PATHS, respond=_respond
    )
    if service.options.allowed_origins:
        # Outermost: a preflight request has no key, and errors of the key are readable too.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=service.options.allowed_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=EXPOSED_HEADERS,
        )
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(BadRequestError, _on_bad_request)
    app.add_exception_handler(RequestFailedError, _on_request_failed)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(RequestValidationError, _on_bad_parameter)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_unexpected)
    # Errors of plugins are raised here, at start.
    app.middleware_stack = app.build_middleware_stack()
    app.openapi = lambda: openapi(app, BODIES)  # type: ignore[method-assign]
    return app


def _respond(error: ApiError, path: str) -> Response:
    """Return an error in the shape of the API that the path belongs to."""
    is_anthropic = path.endswith(anthropic_errors.PATHS)
    body = anthropic_errors.error_body(error) if is_anthropic else error.body()
    return Response(body, error.status, error.headers, "application/json")


def _refuse(request: Request, error: ApiError) -> Response:
    """Return an error, and record it for the request's line in the log."""
    set_reason(request.scope, error.message)
    return _respond(error, request.url.path)


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _refuse(request, error)


async def _on_bad_request(request: Request, error: Exception) -> Response:
    assert isinstance(error, BadRequestError)
    return _refuse(request, ApiError(400, error.message, error.param, error.code))


async def _on_request_failed(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestFailedError)
    return _refuse(request, ApiError.of(error))


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Answer an unknown route, a wrong method, or an error of the framework."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 405:
        allowed = (error.headers or {})["Allow"]
        message = f"{path} takes {allowed} only"
        return _refuse(request, ApiError(405, message, headers={"allow": allowed}))
    message = f"no route {path}" if error.status_code == 404 else str(error.detail)
    return _refuse(request, ApiError(error.status_code, message))


async def _on_bad_parameter(request: Request, error: Exception) -> Response:
    """Answer a wrong parameter of a URL; bodies are checked elsewhere."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = str(first["loc"][-1])
    return _refuse(request, ApiError(400, f"{name}: {first['msg']}", name))


async def _on_disconnect(request: Request, error: Exception) -> Response:
    set_reason(request.scope, CLIENT_LEFT)
    return Response(status_code=499)


async def _on_unexpected(request: Request, error: Exception) -> Response:
    """Answer with a 500; uvicorn logs the traceback."""
    set_reason(request.scope, f"{type(error).__name__}: {error}")
    return _respond(ApiError(500, "the request failed; see the server log"), request.url.path)
