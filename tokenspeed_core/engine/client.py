"""An API worker's end of the socket to the engine: requests out, columns of tokens in, and its health."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any, Protocol

import numpy as np
import zmq

from tokenspeed_core.api.sampling import FinishReason
from tokenspeed_core.engine.messages import (
    WORKER_SHIFT,
    Abort,
    Failed,
    Heartbeat,
    Outputs,
    Ready,
    Rejected,
    Submit,
    TokenLogprobs,
    to_api,
)
from tokenspeed_core.engine.wire import WireError, pack
from tokenspeed_core.errors import RequestFailedError

STALL_SECONDS = 8.0  # with the pulse's second, the health of a stuck engine fails within ten
MESSAGES_PER_TURN = 64
_POLLIN = int(zmq.POLLIN)  # as a plain number: flags of an enum cost microseconds

log = logging.getLogger(__name__)


class Sink(Protocol):
    """Who waits for a sequence."""

    def take(
        self, token_ids: Sequence[int], finish: int, num_cached: int, logprobs: TokenLogprobs | None
    ) -> bool:
        """Add tokens. Return whether the sequence is at its end, whatever the engine thinks."""

    def fail(self, error: RequestFailedError) -> None:
        """End with an error."""


class State(Enum):
    """What an engine is to an API worker."""

    STARTING = "starting"
    READY = "ready"
    DEAD = "dead"


class EngineClient:
    """One engine's socket, watched by the event loop; nothing here blocks or polls."""

    def __init__(
        self, address: str, clock: Callable[[], float] = time.monotonic, worker: int = 0
    ) -> None:
        """Connect to the `address` (ipc://...) that the engine binds. Must be made inside a running event loop.

        Ids of sequences begin with the number of the `worker`, which no other one has.
        """
        self.state = State.STARTING
        self.ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self.dead: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.heartbeat: Heartbeat | None = None
        self._clock = clock
        self._heartbeat_at = self._progress_at = clock()
        self._sinks: dict[int, Sink] = {}
        self._next_id = (worker << WORKER_SHIFT) + 1
        self._loop = asyncio.get_running_loop()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        self._socket.linger = 0
        self._socket.set_hwm(0)
        self._socket.reconnect_ivl = 10  # milliseconds, until the engine is there
        self._socket.connect(address)
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._read)

    @property
    def num_live(self) -> int:
        """Sequences that the engine still works on."""
        return len(self._sinks)

    @property
    def has_work(self) -> bool:
        """Whether the engine had work when it was last heard of, for whichever worker."""
        return (
            self.heartbeat is not None
            and self.heartbeat.num_running + self.heartbeat.num_waiting > 0
        )

    def take_ids(self, count: int) -> int:
        """Return the first of `count` fresh sequence ids."""
        first = self._next_id
        self._next_id += count
        return first

    def submit(self, request: Submit, sinks: Sequence[Sink]) -> None:
        """Send a request; sequence i's tokens go to `sinks[i]`. Raises RequestFailedError when the engine is dead."""
        if self.state is not State.READY:
            raise dead_error()
        for index, sink in enumerate(sinks):
            self._sinks[request.request_id + index] = sink
        self.send(request)

    def abort(self, sequence_ids: Iterable[int]) -> None:
        """Drop sequences that nobody waits for; those that have ended are left out."""
        live = [
            sequence_id
            for sequence_id in sequence_ids
            if self._sinks.pop(sequence_id, None) is not None
        ]
        if live and self.state is State.READY:
            self.send(Abort(np.array(live, np.int64)))

    def send(self, message: Any) -> None:
        """Send a message, which waits for an engine that is not there yet."""
        self._socket.send(pack(message), zmq.DONTWAIT)
        # Sending may swallow the edge by which the descriptor tells of messages that came meanwhile.
        if self._has_message():
            self._loop.call_soon(self._read)

    def die(self, reason: str) -> None:
        """Note that the engine is gone and end whatever waits for it. Only the first reason counts."""
        if self.dead.done():
            return
        self._read()  # what it said last may be its own, better reason
        if self.dead.done():
            return
        self.state = State.DEAD
        self.dead.set_result(reason)
        sinks, self._sinks = self._sinks, {}
        for sink in sinks.values():
            sink.fail(dead_error())

    def close(self) -> None:
        """Close the socket. Safe to call twice."""
        if not self._socket.closed:
            self._loop.remove_reader(self._fd)
            self._socket.close()
            self._context.term()

    def why_unhealthy(self) -> str | None:
        """Return why requests should go elsewhere; None when all is well."""
        if self.state is not State.READY:
            return (
                "the engine is starting" if self.state is State.STARTING else "the engine is dead"
            )
        now = self._clock()
        if now - self._heartbeat_at > STALL_SECONDS:
            return f"the engine has not been heard of for {now - self._heartbeat_at:.0f} s"
        if now - self._progress_at > STALL_SECONDS:
            return f"the engine has work and has not stepped for {now - self._progress_at:.0f} s"
        return None

    def _has_message(self) -> bool:
        return not self._socket.closed and bool(int(self._socket.getsockopt(zmq.EVENTS)) & _POLLIN)

    def _read(self) -> None:
        for _ in range(MESSAGES_PER_TURN):
            if not self._has_message():
                return
            try:
                message = to_api.unpack(self._socket.recv(zmq.DONTWAIT))
            except WireError as error:
                log.error("the engine sent what this version cannot read: %s", error)
                continue
            self._dispatch(message)
        self._loop.call_soon(self._read)

    def _dispatch(self, message: Outputs | Rejected | Heartbeat | Ready | Failed) -> None:
        match message:
            case Outputs():
                self._hand_out(message)
            case Heartbeat():
                self._note_heartbeat(message)
            case Rejected():
                sink = self._sinks.get(message.request_id)
                if sink is not None:
                    sink.fail(RequestFailedError(message.reason, message.message))
            case Ready():
                self.state = State.READY
                self._heartbeat_at = self._progress_at = self._clock()
                self.ready.set_result(message)
            case Failed():
                self.die(message.message)

    def _note_heartbeat(self, pulse: Heartbeat) -> None:
        self._heartbeat_at, before, self.heartbeat = self._clock(), self.heartbeat, pulse
        if before is None or pulse.num_steps != before.num_steps or not self.has_work:
            self._progress_at = self._heartbeat_at

    def _hand_out(self, outputs: Outputs) -> None:
        """Give each sequence its tokens; abort those that their readers ended."""
        ended = []
        for delta in outputs.each():
            sink = self._sinks.get(delta.sequence_id)
            if sink is None:
                continue
            try:
                is_over = sink.take(
                    delta.token_ids, delta.finish, delta.num_cached_tokens, delta.logprobs
                )
            except Exception as error:
                # Turning tokens into text may fail for one request. The others of the step go on.
                log.exception("a request failed while its tokens were turned into text: %s", error)
                sink.fail(RequestFailedError("internal", "the request failed; see the server log"))
                is_over = True
            if delta.finish != FinishReason.NOT:
                del self._sinks[delta.sequence_id]
            elif is_over:
                ended.append(delta.sequence_id)
        if ended:
            self.abort(ended)


def dead_error() -> RequestFailedError:
    """Return the error of requests that a dead engine leaves unfinished."""
    return RequestFailedError("engine_dead", "the engine process died; see the server log")
