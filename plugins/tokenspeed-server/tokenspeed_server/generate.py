"""The two routes that generate, in bare ASGI: a token costs one template and one send."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from tokenspeed_core.api.hooks import RequestRecord
from tokenspeed_core.commands.serving import BadRequestError, RequestFailedError
from tokenspeed_server.errors import ApiError
from tokenspeed_server.events import DONE
from tokenspeed_server.replies import Reply
from tokenspeed_server.service import Body, Job, Service

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_JSON = (b"content-type", b"application/json")
_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]

log = logging.getLogger("tokenspeed.requests")


class ClientGoneError(Exception):
    """The client left before its request was read."""


async def generate(
    service: Service, kind: type[Body], scope: Scope, receive: Receive, send: Send
) -> None:
    """Answer a request of one of the two kinds. Raises ApiError where nothing was answered yet."""
    started = time.monotonic()
    try:
        service.check_open()  # and again once the body is there: a drain waits for no client that still sends
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
                for observe in service.options.observers:
                    observe(_record(reply, started))
    except ClientGoneError:
        return
    except RequestFailedError as error:
        raise ApiError.of(error) from error
    except BadRequestError as error:
        raise ApiError(400, error.message, error.param, error.code) from error


async def _stream(reply: Reply, job: Job, send: Send) -> None:
    """Send events as they come. The status waits for the engine's first word, which may be a refusal."""
    chunk = await reply.wait()
    if reply.error is not None and not chunk:
        raise reply.error
    await send(
        {"type": "http.response.start", "status": 200, "headers": [*_STREAM, _request_id(reply)]}
    )
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
        body = reply.dialect.body(
            reply.answers, reply.usage, shape.num_logprobs >= 0, shape.wants_ids
        )
        await send_json(send, 200, body, [_request_id(reply)])


async def _watch(receive: Receive, reply: Reply) -> None:
    """Notice that the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
    reply.abandon()


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """Return the request's body. Raises ApiError (413) beyond `limit` bytes, before reading where it can."""
    length = header(scope, b"content-length")
    told = int(length) if length.isdigit() else 0
    parts, size, more = [], 0, True
    while more and max(told, size) <= limit:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        more = message.get("more_body", False)
    if max(told, size) > limit:
        raise ApiError(
            413,
            f"the body is larger than the {limit} bytes that this server takes",
            code="too_large",
        )
    return b"".join(parts)


def header(scope: Scope, name: bytes) -> bytes:
    """Return a request header, empty where there is none."""
    return next((value for key, value in scope["headers"] if key == name), b"")


async def send_json(
    send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]]
) -> None:
    """Send a whole JSON answer."""
    length = (b"content-length", str(len(body)).encode())
    await send(
        {"type": "http.response.start", "status": status, "headers": [_JSON, length, *headers]}
    )
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, error: ApiError) -> None:
    """Send an error in OpenAI's shape."""
    headers = [(name.encode(), value.encode()) for name, value in error.headers.items()]
    await send_json(send, error.status, error.body(), headers)


def _request_id(reply: Reply) -> tuple[bytes, bytes]:
    return b"x-request-id", reply.dialect.id.encode()


def _record(reply: Reply, started: float) -> RequestRecord:
    """Return what came of a request that began at `started`."""
    first, usage = reply.first_token_at, reply.usage
    reason = (
        "abort"
        if reply.is_abandoned
        else "error"
        if reply.error
        else reply.answers[0].finish_reason
    )
    return RequestRecord(
        reply.dialect.id,
        usage.num_prompt,
        usage.num_cached or 0,
        usage.num_output,
        reason,
        None if first is None else first - started,
        time.monotonic() - started,
    )


def log_request(record: RequestRecord) -> None:
    """Write one line about a request that ended."""
    first = "none" if record.time_to_first_token is None else f"{record.time_to_first_token:.3f} s"
    log.info(
        "%s: %s; %d prompt tokens (%d cached), %d output tokens, first after %s, all in %.3f s",
        record.request_id,
        record.finish_reason,
        record.num_prompt_tokens,
        record.num_cached_tokens,
        record.num_output_tokens,
        first,
        record.duration,
    )
