"""The engine's client in an API worker: sends requests, delivers tokens, and monitors the engine's health."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
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
    PromptLogprobs,
    Ready,
    Rejected,
    Submit,
    TokenLogprobs,
    to_api,
)
from tokenspeed_core.engine.wire import WireError, pack
from tokenspeed_core.errors import RequestFailedError

# Heartbeats come every second, so a stuck engine is unhealthy within ten seconds.
STALL_SECONDS = 8.0
TURN_SECONDS = 0.005  # for messages, before the event loop handles other events
# A plain integer: operations on zmq's enum take microseconds.
_POLLIN = int(zmq.POLLIN)

log = logging.getLogger(__name__)


class Sink(Protocol):
    """The receiver of one sequence's tokens."""

    def take(
        self, token_ids: Sequence[int], finish: int, num_cached: int, logprobs: TokenLogprobs | None
    ) -> bool:
        """Add tokens. Return whether the engine must abort the sequence, since it is complete."""

    def take_prompt(self, logprobs: PromptLogprobs) -> None:
        """Add log-probabilities of the next prompt tokens. Called only for requests that want them."""

    def fail(self, error: RequestFailedError) -> None:
        """End the sequence with an error."""


class State(Enum):
    """The state of the engine."""

    STARTING = "starting"
    READY = "ready"
    DEAD = "dead"


@dataclass(slots=True)
class Delivery:
    """When the newest tokens arrived, on the monotonic clock in seconds."""

    at: float = 0.0


class EngineClient:
    """The connection to one engine, driven by the event loop. Nothing blocks or polls."""

    def __init__(
        self,
        address: str,
        clock: Callable[[], float] = time.monotonic,
        worker: int = 0,
        delivery: Delivery | None = None,
    ) -> None:
        """Connect to the `address` (ipc://...) that the engine binds. Needs a running event loop.

        `worker` is the number of this API worker; it makes sequence ids unique among workers. The clients of several
        engines share a `delivery`.
        """
        self.state = State.STARTING
        self.ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self.dead: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.heartbeat: Heartbeat | None = None
        self.delivery = delivery or Delivery()
        self.on_heartbeat: Callable[[Heartbeat], None] = lambda heartbeat: None
        self._clock = clock
        self._heartbeat_at = self._progress_at = clock()
        self._sinks: dict[int, Sink] = {}
        self._next_id = (worker << WORKER_SHIFT) + 1
        self._loop = asyncio.get_running_loop()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        self._socket.linger = 0
        self._socket.set_hwm(0)
        self._socket.reconnect_ivl = 10  # milliseconds
        self._socket.connect(address)
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._read)

    @property
    def num_live(self) -> int:
        """Number of sequences that the engine still works on."""
        return len(self._sinks)

    @property
    def has_work(self) -> bool:
        """Whether the engine had work, for any worker, at its last heartbeat."""
        return (
            self.heartbeat is not None
            and self.heartbeat.num_running + self.heartbeat.num_waiting > 0
        )

    def take_ids(self, count: int) -> int:
        """Allocate `count` consecutive sequence ids and return the first."""
        first = self._next_id
        self._next_id += count
        return first

    def submit(self, request: Submit, sinks: Sequence[Sink]) -> None:
        """Send a request; `sinks[i]` gets the tokens of sequence i. Raises RequestFailedError if the engine is dead."""
        if self.state is not State.READY:
            raise dead_error()
        for index, sink in enumerate(sinks):
            self._sinks[request.request_id + index] = sink
        self.send(request)

    def replace(self, sequence_id: int, sink: Sink) -> None:
        """Deliver the next tokens of a sequence to another sink."""
        self._sinks[sequence_id] = sink

    def abort(self, sequence_ids: Iterable[int]) -> None:
        """Abort sequences. Ids of ended sequences are ignored."""
        live = [
            sequence_id
            for sequence_id in sequence_ids
            if self._sinks.pop(sequence_id, None) is not None
        ]
        if live and self.state is State.READY:
            self.send(Abort(np.array(live, np.int64)))

    def fail_all(self, error: RequestFailedError) -> None:
        """Abort all sequences; their sinks get the error."""
        sinks = dict(self._sinks)
        self.abort(sinks)
        for sink in sinks.values():
            sink.fail(error)

    def send(self, message: Any) -> None:
        """Send a message. It is queued until the engine has started."""
        self._socket.send(pack(message), zmq.DONTWAIT)
        # The descriptor is edge-triggered, and sending may consume the edge of an arrived message.
        if self._has_message():
            self._loop.call_soon(self._read)

    def receive(self, message: Outputs | Rejected | Heartbeat | Ready | Failed) -> None:
        """Handle a message of the engine."""
        match message:
            case Outputs():
                self._deliver(message)
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

    def die(self, reason: str, error: RequestFailedError | None = None) -> None:
        """Mark the engine as dead and fail all sequences with `error`, by default that the engine died.

        Only the first reason is kept.
        """
        if self.dead.done():
            return
        self._read()  # the engine may have sent a better reason before it died
        if self.dead.done():
            return
        self.state = State.DEAD
        self.dead.set_result(reason)
        sinks, self._sinks = self._sinks, {}
        for sink in sinks.values():
            sink.fail(error or dead_error())

    def close(self) -> None:
        """Close the socket. Safe to call twice."""
        if not self._socket.closed:
            self._loop.remove_reader(self._fd)
            self._socket.close()
            self._context.term()

    def why_unhealthy(self) -> str | None:
        """Return why the engine is unhealthy, or None if it is healthy."""
        if self.state is not State.READY:
            return (
                "the engine is starting" if self.state is State.STARTING else "the engine is dead"
            )
        now = self._clock()
        if now - self._heartbeat_at > STALL_SECONDS:
            return f"no heartbeat from the engine for {now - self._heartbeat_at:.0f} s"
        if now - self._progress_at > STALL_SECONDS:
            return f"the engine has work but has not stepped for {now - self._progress_at:.0f} s"
        return None

    def _has_message(self) -> bool:
        return not self._socket.closed and bool(int(self._socket.getsockopt(zmq.EVENTS)) & _POLLIN)

    def _read(self) -> None:
        end = time.monotonic() + TURN_SECONDS
        while self._has_message():
            try:
                message = to_api.unpack(self._socket.recv(zmq.DONTWAIT))
            except WireError as error:
                log.error("unreadable message from the engine: %s", error)
                continue
            self.receive(message)
            if time.monotonic() > end:
                self._loop.call_soon(self._read)
                return

    def _note_heartbeat(self, heartbeat: Heartbeat) -> None:
        before = self.heartbeat
        self.heartbeat = heartbeat
        self._heartbeat_at = self._clock()
        if before is None or heartbeat.num_steps != before.num_steps or not self.has_work:
            self._progress_at = self._heartbeat_at
        self.on_heartbeat(heartbeat)

    def _deliver(self, outputs: Outputs) -> None:
        """Deliver the tokens of each sequence; abort the sequences that their sinks completed."""
        self.delivery.at = self._clock()
        ended = []
        for prompt in outputs.prompts:
            sink = self._sinks.get(prompt.sequence_id)
            if sink is not None:
                sink.take_prompt(prompt)
        for delta in outputs.each():
            sink = self._sinks.get(delta.sequence_id)
            if sink is None:
                continue
            try:
                is_over = sink.take(
                    delta.token_ids, delta.finish, delta.num_cached_tokens, delta.logprobs
                )
            except Exception as error:
                # Decoding may fail for one request. The other requests of the step continue.
                log.exception("cannot convert the tokens of a request to text: %s", error)
                sink.fail(RequestFailedError("internal", "the request failed; see the server log"))
                is_over = True
            if delta.finish != FinishReason.NOT:
                del self._sinks[delta.sequence_id]
            elif is_over:
                ended.append(delta.sequence_id)
        if ended:
            self.abort(ended)


def dead_error() -> RequestFailedError:
    """Return the error for requests that a dead engine did not finish."""
    return RequestFailedError("engine_dead", "the engine process died; see the server log")
