"""The HTTP/1.1 connection, with bounds on its time, on its size, and on the number of connections."""

from __future__ import annotations

import asyncio
import logging
import resource
from dataclasses import dataclass
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from tokenspeed_core.commands.serving import log_fields
from tokenspeed_server.errors import ApiError

MAX_HEADERS = 128
MIN_CHUNKS = 1024  # parts of a body that are always allowed; each takes about 20 us
MIN_CHUNK_BYTES = 512  # mean size of further parts
SLICE_BYTES = 16 * 1024  # parsed at once before the size of a request's head is known
MIN_BYTES_PER_SECOND = 512  # that a client must read once the system's buffers are full
LINGER_SECONDS = 5.0  # to receive the rest of a body after the answer to it
RESERVED_FILES = 128  # file descriptors that connections cannot take
MAX_FILES = 65536
MAX_REASON = 200  # characters of what is wrong with a request

log = logging.getLogger("tokenspeed.http")


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Bounds of connections. Times are in seconds."""

    max_connections: int = 4096
    max_header_bytes: int = 32 * 1024
    receive_timeout: float = 60.0
    send_timeout: float = 60.0

    def within_file_limit(self) -> int:
        """Return the number of connections for which there are file descriptors."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return max(1, min(self.max_connections, soft - RESERVED_FILES))


def raise_file_limit() -> None:
    """Raise this process's limit of open files as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class Connection(H11Protocol):
    """A connection that must send a request in time and read the response in time.

    uvicorn limits neither of these times, nor the number of connections, nor the parts of a body. Each
    event of the parser takes time in the event loop, which delays the streams of other clients.
    """

    def __init__(self, *arguments: Any, limits: ConnectionLimits, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._limits = limits
        self._max_connections = limits.within_file_limit()
        self._next_event = self.conn.next_event
        self.conn.next_event = self._checked_event  # type: ignore[method-assign]
        self._awaited: str | None = None  # "head" or "body", while a deadline runs
        self._deadline: asyncio.TimerHandle | None = None
        self._read_check: asyncio.TimerHandle | None = None
        self._num_chunks = 0
        self._num_bytes = 0
        self._made_at = self.loop.time()

    @property
    def is_working(self) -> bool:
        """Whether a complete request waits for the end of its response."""
        is_answered = self.cycle is None or self.cycle.response_complete
        return self.flow.write_paused or not (is_answered or self._awaited)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start to wait for a request, or refuse the connection if all others are working."""
        super().connection_made(transport)
        if len(self.connections) > self._max_connections and not self._end_another():
            error = ApiError(503, "too many connections", code="too_many_connections")
            self._refuse(error)
            return
        self._await("head")

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers."""
        self._await(None)
        self._stop_read_check()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes. A long head is refused before all of it is parsed."""
        if self.transport.is_closing():
            return
        start = 0
        while start < len(data) and not self.transport.is_closing():
            is_body = self.conn.their_state is h11.SEND_BODY
            end = len(data) if is_body else start + SLICE_BYTES
            super().data_received(data if start == 0 and end >= len(data) else data[start:end])
            start = end
            if self._has_long_tail():
                self.transport.abort()
        self._update_deadline()

    def on_response_complete(self) -> None:
        """Wait for the next request, or for the rest of a body whose response was sent early."""
        super().on_response_complete()
        self._update_deadline()

    def pause_writing(self) -> None:
        """Start watching a client that does not read."""
        super().pause_writing()
        if self._read_check is None:
            self._check_reads_later()

    def resume_writing(self) -> None:
        """Stop watching the client."""
        super().resume_writing()
        self._stop_read_check()

    def _has_long_tail(self) -> bool:
        """Whether the client sent more than a head before its current request was answered."""
        if self.conn.their_state is not h11.DONE:
            return False
        return len(self.conn.trailing_data[0]) > self._limits.max_header_bytes

    def _should_upgrade(self) -> bool:
        """Answer a request for another protocol, such as WebSocket or h2c, in HTTP/1.1."""
        return False

    def _checked_event(self) -> Any:
        """Return the parser's next event. Refuses the request if it is malformed or beyond the limits."""
        try:
            return self._counted_event()
        except h11.RemoteProtocolError as error:
            # h11 quotes what it received.
            reason = str(error).partition(": bytearray(")[0][:MAX_REASON]
            status = error.error_status_hint
            host = self.client[0] if self.client else ""
            log.info(
                "malformed request %s: %s",
                status,
                reason,
                extra=log_fields(client=host, status=status, reason=reason),
            )
            self._refuse(ApiError(status, f"malformed request: {reason}", code="malformed_request"))
            return h11.NEED_DATA

    def _counted_event(self) -> Any:
        """Return the parser's next event. Raises RemoteProtocolError beyond the limits."""
        event = self._next_event()
        if type(event) is h11.Request:
            self._num_chunks = self._num_bytes = 0
            if not event.http_version.startswith(b"1."):
                raise h11.RemoteProtocolError("unsupported version of HTTP", error_status_hint=505)
            if len(event.headers) > MAX_HEADERS:
                raise h11.RemoteProtocolError("too many headers", error_status_hint=431)
        elif type(event) is h11.Data:
            self._num_chunks += 1
            self._num_bytes += len(event.data)
            if self._num_chunks > MIN_CHUNKS + self._num_bytes // MIN_CHUNK_BYTES:
                raise h11.RemoteProtocolError("the body has too many chunks")
        return event

    def _update_deadline(self) -> None:
        state = self.conn.their_state
        if self.transport.is_closing():
            self._await(None)
        elif state is h11.SEND_BODY:
            is_answered = self.cycle is not None and self.cycle.response_complete
            self._await("rest" if is_answered else "body")
        elif state is h11.IDLE and (self.cycle is None or self.conn.trailing_data[0]):
            self._await("head")
        else:
            self._await(None)

    def _await(self, what: str | None) -> None:
        """Set the deadline of a part of a request, unless it runs already."""
        if what == self._awaited:
            return
        self._awaited = what
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if what is not None:
            seconds = LINGER_SECONDS if what == "rest" else self._limits.receive_timeout
            self._deadline = self.loop.call_later(seconds, self._on_deadline)

    def _on_deadline(self) -> None:
        """Close the connection: a request did not arrive in time."""
        is_silent = self.cycle is None and not self.conn.trailing_data[0]
        if self._awaited == "rest" or is_silent:
            self.transport.close()
            return
        error = ApiError(
            408,
            f"the {self._awaited} of the request did not arrive within "
            f"{self._limits.receive_timeout:g} s",
            code="receive_timeout",
        )
        self._refuse(error)

    def _refuse(self, error: ApiError) -> None:
        """Answer with an error, if nothing was sent yet, and close the connection."""
        is_answering = self.cycle is not None and self.cycle.response_started
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # what the application still sends is dropped
            self.cycle.message_event.set()
        if not is_answering or self.cycle.response_complete:
            body = error.body()
            head = (
                f"HTTP/1.1 {error.status} \r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()

    def _end_another(self) -> bool:
        """Close the oldest connection without a whole request. Return whether there was one."""
        others = [
            other
            for other in self.connections
            if isinstance(other, Connection)
            and other is not self
            and not other.is_working
            and not other.transport.is_closing()
        ]
        if others:
            min(others, key=lambda other: other._made_at).transport.abort()
        return bool(others)

    def _check_reads_later(self) -> None:
        size = self.transport.get_write_buffer_size()
        self._read_check = self.loop.call_later(self._limits.send_timeout, self._check_reads, size)

    def _check_reads(self, size_before: int) -> None:
        """Close the connection if the client read too little since the last check."""
        progress = size_before - self.transport.get_write_buffer_size()
        if progress < MIN_BYTES_PER_SECOND * self._limits.send_timeout:
            self.transport.abort()
        else:
            self._check_reads_later()

    def _stop_read_check(self) -> None:
        if self._read_check is not None:
            self._read_check.cancel()
            self._read_check = None
