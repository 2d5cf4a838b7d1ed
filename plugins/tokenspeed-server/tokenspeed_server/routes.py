"""The routes, and what they depend on: an admitted request with a body that was read and parsed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response

import tokenspeed_core
from tokenspeed_server.errors import ApiError, model_not_found
from tokenspeed_server.generation import Body, ParsedRequest, parse_request
from tokenspeed_server.protocol import ChatRequest, CompletionRequest
from tokenspeed_server.responses import GenerationResponse
from tokenspeed_server.service import Service

MAX_INLINE_BYTES = 4096  # longer bodies are parsed and tokenised in a thread

_ERRORS = {
    400: "a field is wrong, unknown or not supported",
    401: "missing or wrong API key",
    404: "no such model",
    413: "the body is too large",
    429: "the queue is full; see Retry-After",
    500: "the engine failed",
    503: "the server is starting, draining, or its engine is dead",
}

router = APIRouter()


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI descriptions of error responses."""
    schema = {"$ref": "#/components/schemas/Error"}
    return {
        status: {
            "description": _ERRORS[status],
            "content": {"application/json": {"schema": schema}},
        }
        for status in statuses
    }


def get_service(request: Request) -> Service:
    """Return the service of the app."""
    service: Service = request.app.state.service
    return service


async def _read_body(request: Request, limit: int) -> bytes:
    """Return the request's body. Raises ApiError (413) beyond `limit` bytes, early if possible."""
    too_large = ApiError(
        413, f"the body is larger than this server's limit of {limit} bytes", code="too_large"
    )
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise too_large
    parts, size = [], 0
    async for part in request.stream():
        parts.append(part)
        size += len(part)
        if size > limit:
            raise too_large
    return b"".join(parts)


async def _parse(service: Service, kind: type[Body], data: bytes) -> ParsedRequest:
    if len(data) <= MAX_INLINE_BYTES:
        return parse_request(service, kind, data)
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(service.pool, parse_request, service, kind, data)


def admitted(kind: type[Body]) -> Callable[[Request], AsyncIterator[GenerationResponse]]:
    """Return the dependency that reads, admits and parses a request, and makes its response.

    The request counts as active until it is answered. It is one dependency, since FastAPI takes
    about 20 us for each. Raises ApiError before the body is read if the server admits no requests.
    """

    async def admit(request: Request) -> AsyncIterator[GenerationResponse]:
        started_at = time.monotonic()
        service = get_service(request)
        service.check_open()
        data = await _read_body(request, service.options.max_body_bytes)
        with service.admitted():  # a drain does not wait for a body
            yield GenerationResponse(service, await _parse(service, kind, data), started_at)

    return admit


def _describe(kind: type[Body]) -> dict[str, Any]:
    """Return the options of a generation route. FastAPI cannot see the body that `admitted` reads."""
    schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
    return {
        "response_class": Response,
        "openapi_extra": {
            "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}
        },
        "responses": {
            200: {
                "description": "the answer, or a stream of events that ends with [DONE]",
                "content": {"application/json": {}, "text/event-stream": {}},
            },
            **_errors(400, 401, 404, 413, 429, 500, 503),
        },
    }


@router.post("/v1/completions", **_describe(CompletionRequest))
async def create_completion(
    response: Annotated[GenerationResponse, Depends(admitted(CompletionRequest))],
) -> Response:
    """Complete a prompt: text, token ids, or a list of either."""
    return response


@router.post("/v1/chat/completions", **_describe(ChatRequest))
async def create_chat_completion(
    response: Annotated[GenerationResponse, Depends(admitted(ChatRequest))],
) -> Response:
    """Answer a chat, rendered by the model's template."""
    return response


@router.get("/health", responses=_errors(503))
async def health(request: Request) -> JSONResponse:
    """Report whether the server accepts requests. The only route that needs no API key."""
    reason = get_service(request).why_unhealthy()
    if reason is None:
        return JSONResponse({"status": "ok"})
    return JSONResponse({"status": "unhealthy", "reason": reason}, 503)


@router.get("/version", responses=_errors(401))
async def version() -> JSONResponse:
    """Return the server's version."""
    return JSONResponse({"version": tokenspeed_core.__version__})


@router.get("/v1/models", responses=_errors(401))
async def list_models(request: Request) -> JSONResponse:
    """List the served model."""
    return JSONResponse({"object": "list", "data": [_model(get_service(request))]})


@router.get("/v1/models/{model_id:path}", responses=_errors(401, 404))
async def get_model(request: Request, model_id: str) -> JSONResponse:
    """Return the served model and its context length."""
    service = get_service(request)
    if model_id != service.options.model_name:
        raise model_not_found(model_id, service.options.model_name)
    return JSONResponse(_model(service))


@router.get("/v1/plugins", responses=_errors(401, 503))
async def list_plugins(request: Request) -> Response:
    """Return the plugins and kernels in use, with the reasons."""
    report = get_service(request).serving.limits.report
    return Response(report, media_type="application/json")


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.options.model_name,
        "object": "model",
        "created": 0,
        "owned_by": "tokenspeed",
        "max_model_len": service.serving.limits.longest if service.is_open else None,
    }
