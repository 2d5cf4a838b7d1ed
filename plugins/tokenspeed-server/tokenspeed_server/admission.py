"""The dependencies of routes: they admit, read and parse a request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextvars import copy_context
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect

from tokenspeed_server.body_limits import check_cost
from tokenspeed_server.errors import ApiError
from tokenspeed_server.generation import ParsedRequest
from tokenspeed_server.generation_response import GenerationResponse
from tokenspeed_server.service import Service
from tokenspeed_server.unknown_fields import header

MAX_INLINE_BYTES = 4096  # longer bodies are parsed and tokenized in a thread

T = TypeVar("T")
# Parses a body with the request's headers. Runs in a thread if the body is long.
Parse = Callable[[Service, bytes, Headers], T]


def get_service(request: Request) -> Service:
    """Return the service of the app."""
    service: Service = request.app.state.service
    return service


async def read_body(request: Request, limit: int) -> bytes:
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


async def _read_checked(request: Request, service: Service) -> bytes:
    """Return a body that is cheap to parse. Raises ApiError, and BadRequestError for other bodies."""
    data = await read_body(request, service.max_body_bytes)
    limit = service.max_body_values
    if len(data) <= MAX_INLINE_BYTES:
        check_cost(data, limit)
    else:
        await service.engine.in_thread(check_cost, data, limit)
    return data


def is_long(data: bytes) -> bool:
    """Return whether a body is parsed in a thread, so that other streams continue.

    Chats of any length are parsed in a thread too, because rendering their template may be slow.
    """
    return len(data) > MAX_INLINE_BYTES or b'"messages"' in data or b'"input"' in data


async def _parsed(
    service: Service, parse: Parse[T], data: bytes, headers: Headers, in_thread: bool
) -> T:
    if not in_thread:
        return parse(service, data, headers)
    run = copy_context().run  # the tenant is in the context
    return await service.engine.in_thread(run, parse, service, data, headers)


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """Return the result of work. Raises ClientDisconnect, and cancels it, if the client leaves."""
    task = asyncio.ensure_future(work)
    left = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((task, left), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        left.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def admitted(
    parse: Parse[ParsedRequest],
) -> Callable[[Request], Awaitable[GenerationResponse]]:
    """Return the dependency that reads, admits and parses a request, and makes its response.

    The request counts as active until its response is over. It is one dependency, since FastAPI
    takes about 20 us for each, and no generator, which would cost 100 us more. Raises ApiError
    before the body is read if the server admits no requests.
    """

    async def admit(request: Request) -> GenerationResponse:
        started_at = time.monotonic()
        service = get_service(request)
        service.check_open()
        data = await _read_checked(request, service)
        service.enter()  # a drain does not wait for a body
        try:
            in_thread = is_long(data)
            work = _parsed(service, parse, data, request.headers, in_thread)
            parsed = await (while_connected(request, work) if in_thread else work)
        except BaseException:
            service.leave()
            raise
        return GenerationResponse(service, parsed, started_at)

    return admit


def computed(parse: Parse[T]) -> Callable[[Request], AsyncIterator[T]]:
    """Return the dependency for routes that compute an answer from a body, without the engine."""

    async def compute(request: Request) -> AsyncIterator[T]:
        service = get_service(request)
        service.check_open()
        data = await _read_checked(request, service)
        with service.admitted():
            yield await _parsed(service, parse, data, request.headers, is_long(data))

    return compute


def computed_answer(service: Service, answer: Any, ignored: Sequence[str]) -> JSONResponse:
    """Return an answer that names the ignored fields of its request."""
    response = JSONResponse(answer)
    if ignored:
        service.ignored_fields.note(ignored)
        response.raw_headers.append(header(ignored))
    return response
