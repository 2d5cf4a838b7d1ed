"""The responses of the generation routes, written to ASGI directly: a token costs one send."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from tokenspeed_server.errors import ApiError
from tokenspeed_server.exchange import CLIENT_LEFT, set_reason
from tokenspeed_server.generation import ParsedRequest, start
from tokenspeed_server.replies import Reply, Timing
from tokenspeed_server.request_log import log_request, make_record
from tokenspeed_server.service import Service
from tokenspeed_server.unknown_fields import header

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
]

DIRECT_SEND = "tokenspeed.send"  # key of a scope: the ASGI `send` without the framework's wrappers

Headers = list[tuple[bytes, bytes]]


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
        try:
            await self._answer(scope, receive, send)
        finally:
            self._service.leave()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply, ids = start(self._service, self._request)
        metrics = self._service.observability.worker
        if metrics is not None:
            reply.timing = Timing(
                metrics.time_to_first_token,
                metrics.inter_token_latency,
                self._service.engine.connection.delivery,
                self._started_at,
            )
        headers: Headers = []
        if self._request.ignored:
            headers.append(header(self._request.ignored))
        watch = asyncio.create_task(_watch(receive, reply))
        deadline = self._start_deadline(reply)
        try:
            if self._request.body.stream:
                # In its own task: otherwise each token resumes every coroutine up to uvicorn's.
                await asyncio.create_task(_stream(reply, headers, send, scope[DIRECT_SEND]))
            else:
                await _send_whole(self._service, reply, headers, send)
        finally:
            watch.cancel()
            if deadline is not None:
                deadline.cancel()
            self._service.engine.abort(ids)
            if not reply.is_abandoned:
                has_failed = reply.error is not None and reply.error.status == 500
                self._service.note_end(has_failed=has_failed)
            if reply.is_abandoned:
                set_reason(scope, CLIENT_LEFT)
            elif reply.error is not None:
                set_reason(scope, reply.error.message)
            self._report(scope, reply)

    def _report(self, scope: Scope, reply: Reply) -> None:
        """Count and log the request, and report it to the hooks."""
        options, metrics = self._service.options, self._service.observability.worker
        record = make_record(scope, options.model_name, self._request, reply, self._started_at)
        if metrics is not None:
            metrics.observe_request(record)
        level = options.request_log_level
        if level is not None:
            tokenizer = self._service.inputs.text.tokenizer
            log_request(record, level, self._request, reply, tokenizer)
        for observe in options.observers:
            observe(record)

    def _start_deadline(self, reply: Reply) -> asyncio.TimerHandle | None:
        """Let the reply fail when the request has taken too long, if there is a limit."""
        seconds = self._service.options.request_timeout
        if seconds is None:
            return None
        error = ApiError(
            504, f"the request took longer than the limit of {seconds:g} s", code="request_timeout"
        )
        left = self._started_at + seconds - time.monotonic()
        return asyncio.get_running_loop().call_later(left, reply.fail, error)


async def _stream(reply: Reply, headers: Headers, send: Send, direct_send: Send) -> None:
    """Send events as they come. The status waits for the engine, which may reject the request."""
    chunk = await reply.wait()
    if reply.error is not None and not chunk:
        raise reply.error
    await send(_start([*_STREAM_HEADERS, *headers]))
    chunk = reply.format.opening(len(reply.answers), reply.usage) + chunk
    while reply.num_open and reply.error is None and not reply.is_abandoned:
        await direct_send({"type": "http.response.body", "body": chunk, "more_body": True})
        chunk = await reply.wait()
    if reply.error is not None:
        chunk += reply.format.failure(reply.error)
    elif not reply.is_abandoned:
        chunk += reply.format.closing(reply.answers, reply.usage)
    await direct_send({"type": "http.response.body", "body": chunk, "more_body": False})


async def _send_whole(service: Service, reply: Reply, headers: Headers, send: Send) -> None:
    while reply.num_open and reply.error is None and not reply.is_abandoned:
        await reply.wait()
    if reply.error is not None:
        raise reply.error
    if reply.is_abandoned:
        return
    wants_logprobs, wants_ids = reply.options.num_logprobs >= 0, reply.options.wants_ids
    arguments = (reply.answers, reply.usage, wants_logprobs, wants_ids)
    if not reply.format.takes_deltas and (
        wants_logprobs or any(answer.prompt for answer in reply.answers)
    ):
        # Log-probabilities take about 10 us per token to write.
        written: Iterator[bytes] = reply.format.pieces(*arguments)
        pieces = await service.engine.in_thread(list, written)
    else:
        pieces = [reply.format.body(*arguments)]
    length = (b"content-length", str(sum(map(len, pieces))).encode())
    await send(_start([(b"content-type", b"application/json"), length, *headers]))
    for piece in pieces[:-1]:
        await send({"type": "http.response.body", "body": piece, "more_body": True})
        await asyncio.sleep(0)  # sending returns at once while the client reads fast
    await send({"type": "http.response.body", "body": pieces[-1]})


async def _watch(receive: Receive, reply: Reply) -> None:
    """Abandon the reply when the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass
    reply.abandon()


def _start(headers: Headers) -> Message:
    return {"type": "http.response.start", "status": 200, "headers": headers}
