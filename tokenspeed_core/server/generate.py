"""The two routes that generate, in bare ASGI: a token costs one template and one send."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from tokenspeed_core.requests import BadRequestError
from tokenspeed_core.server.errors import ApiError
from tokenspeed_core.server.events import DONE
from tokenspeed_core.server.replies import Reply
from tokenspeed_core.server.service import Body, Job, Service

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_JSON = (b"content-type", b"application/json")
_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]

log = logging.getLogger("tokenspeed.requests")


class ClientGoneError(Exception):
    """The client left before its request was read."""


async def generate(service: Service, kind: type[Body], scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request of one of the two kinds."""
    started = time.monotonic()
    try:
        body = await read_body(scope, receive, service.options.max_body_bytes)
        with service.admitted():
            job = await service.read(kind, body)
            reply, ids = service.start(job)
            watch = asyncio.create_task(_watch(receive, reply))
            try:
                await (_stream(reply, job, send) if job.body.stream else _collect(reply, send))
            finally:
                watch.cancel()
                service.link.abort(ids)
                if service.options.logs_requests:
                    _log(reply, job, time.monotonic() - started)
    except ClientGoneError:
        return
    except BadRequestError as error:
        await send_error(send, ApiError.of(error))
    except ApiError as error:
        await send_error(send, error)


async def _stream(reply: Reply, job: Job, send: Send) -> None:
    """Send events as they come. The status waits for the engine's first word, which may be a refusal."""
    chunk = await reply.wait()
    if reply.error is not None and not chunk:
        raise reply.error
    await send({"type": "http.response.start", "status": 200, "headers": [*_STREAM, _request_id(reply)]})
    chunk = reply.dialect.opening(len(reply.answers)) + chunk
    while reply.num_open and reply.error is None and not reply.is_abandoned:
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
        chunk = await reply.wait()
    if reply.error is not None:
        chunk += reply.error.event()
    else:
        options = job.body.stream_options
        if options is not None and options.include_usage:
            chunk += reply.dialect.usage(reply.usage)
        chunk += DONE
    await send({"type": "http.response.body", "body": chunk, "more_body": False})


async def _collect(reply: Reply, send: Send) -> None:
    while reply.num_open and reply.error is None and not reply.is_abandoned:
        await reply.wait()
    if reply.error is not None:
        raise reply.error
    if not reply.is_abandoned:
        shape = reply.shape
        body = reply.dialect.body(reply.answers, reply.usage, shape.num_logprobs >= 0, shape.wants_ids)
        await send_json(send, 200, body, [_request_id(reply)])


async def _watch(receive: Receive, reply: Reply) -> None:
    """Notice that the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
    reply.abandon()


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """Return the request's body. Raises ApiError (413) beyond `limit` bytes, before reading where it can."""
    length = header(scope, b"content-length")
    parts, size = [], int(length) if length.isdigit() else 0
    more = size <= limit
    if more:
        size = 0
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        more = message.get("more_body", False) and size <= limit
    if size > limit:
        raise ApiError(413, f"the body is larger than the {limit} bytes that this server takes", code="too_large")
    return b"".join(parts)


def header(scope: Scope, name: bytes) -> bytes:
    """Return a request header, empty where there is none."""
    return next((value for key, value in scope["headers"] if key == name), b"")


async def send_json(send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    """Send a whole JSON answer."""
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [_JSON, length, *headers]})
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, error: ApiError) -> None:
    """Send an error in OpenAI's shape."""
    await send_json(send, error.status, error.body(), encode_headers(error.headers))


def encode_headers(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """Return headers as ASGI has them."""
    return [(name.encode(), value.encode()) for name, value in headers.items()]


def _request_id(reply: Reply) -> tuple[bytes, bytes]:
    return b"x-request-id", reply.dialect.id.encode()


def _log(reply: Reply, job: Job, seconds: float) -> None:
    reasons = ",".join(answer.finish_reason for answer in reply.answers if answer.finish_reason)
    end = "client left" if reply.is_abandoned else reply.error.message if reply.error else reasons
    log.info(
        "%s: %d prompt and %d output tokens in %.3f s: %s; %s",
        reply.dialect.id, reply.usage.num_prompt, reply.usage.num_output, seconds, end or "done",
        job.params.model_dump(exclude_defaults=True),
    )
