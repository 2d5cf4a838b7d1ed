"""The responses of the two generation routes, written to ASGI directly: a token costs one send."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from tokenspeed_core.api.hooks import RequestRecord
from tokenspeed_server.formats import DONE
from tokenspeed_server.generation import ParsedRequest, start
from tokenspeed_server.replies import Reply
from tokenspeed_server.service import Service

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
]

DIRECT_SEND = "tokenspeed.send"  # in a scope: the ASGI `send` behind the framework's wrappers

log = logging.getLogger("tokenspeed.requests")


class GenerationResponse(Response):
    """Runs a request on the engine and answers as its tokens come, or when it is over.

    Raises ApiError, BadRequestError or RequestFailedError before anything is sent. The engine
    drops the request's sequences however the response ends.
    """

    def __init__(self, service: Service, request: ParsedRequest, started_at: float) -> None:
        self.status_code = 200
        self.background = None
        self._service = service
        self._request = request
        self._started_at = started_at  # on the monotonic clock, in seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        reply, ids = start(self._service, self._request)
        watch = asyncio.create_task(_watch(receive, reply))
        try:
            if self._request.body.stream:
                # In its own task: otherwise each token resumes every coroutine up to uvicorn's.
                await asyncio.create_task(
                    _stream(reply, self._request.wants_usage, send, scope[DIRECT_SEND])
                )
            else:
                await _send_whole(reply, send)
        finally:
            watch.cancel()
            self._service.engine.abort(ids)
            for observe in self._service.options.observers:
                observe(_record(reply, self._started_at))


async def _stream(reply: Reply, wants_usage: bool, send: Send, direct_send: Send) -> None:
    """Send events as they come. The status waits for the engine, which may reject the request."""
    chunk = await reply.wait()
    if reply.error is not None and not chunk:
        raise reply.error
    await send(_start([*_STREAM_HEADERS, _request_id(reply)]))
    chunk = reply.format.opening(len(reply.answers)) + chunk
    while reply.num_open and reply.error is None and not reply.is_abandoned:
        await direct_send({"type": "http.response.body", "body": chunk, "more_body": True})
        chunk = await reply.wait()
    if reply.error is not None:
        chunk += reply.error.event()
    else:
        if wants_usage:
            chunk += reply.format.usage(reply.usage)
        chunk += DONE
    await direct_send({"type": "http.response.body", "body": chunk, "more_body": False})


async def _send_whole(reply: Reply, send: Send) -> None:
    while reply.num_open and reply.error is None and not reply.is_abandoned:
        await reply.wait()
    if reply.error is not None:
        raise reply.error
    if reply.is_abandoned:
        return
    options = reply.options
    body = reply.format.body(
        reply.answers, reply.usage, options.num_logprobs >= 0, options.wants_ids
    )
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        _request_id(reply),
    ]
    await send(_start(headers))
    await send({"type": "http.response.body", "body": body})


async def _watch(receive: Receive, reply: Reply) -> None:
    """Abandon the reply when the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass
    reply.abandon()


def _start(headers: list[tuple[bytes, bytes]]) -> Message:
    return {"type": "http.response.start", "status": 200, "headers": headers}


def _request_id(reply: Reply) -> tuple[bytes, bytes]:
    return b"x-request-id", reply.format.id.encode()


def _record(reply: Reply, started_at: float) -> RequestRecord:
    first, usage = reply.first_token_at, reply.usage
    if reply.is_abandoned:
        reason = "abort"
    elif reply.error:
        reason = "error"
    else:
        reason = reply.answers[0].finish_reason
    return RequestRecord(
        reply.format.id,
        usage.num_prompt,
        usage.num_cached or 0,
        usage.num_output,
        reason,
        None if first is None else first - started_at,
        time.monotonic() - started_at,
    )


def log_request(record: RequestRecord) -> None:
    """Log one line about a request that ended."""
    first: Any = record.time_to_first_token
    log.info(
        "%s: %s; %d prompt tokens (%d cached), %d output tokens, first token %s, total %.3f s",
        record.request_id,
        record.finish_reason,
        record.num_prompt_tokens,
        record.num_cached_tokens,
        record.num_output_tokens,
        "never" if first is None else f"after {first:.3f} s",
        record.duration,
    )
