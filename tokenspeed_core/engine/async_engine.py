"""The asyncio interface to engine processes. `AsyncLLM` and the API workers of a server are built on it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from tokenspeed_core.api.sampling import SamplingParams
from tokenspeed_core.api.step import I32
from tokenspeed_core.engine.client import Delivery, Sink, State
from tokenspeed_core.engine.inputs import InputProcessor, ModelText
from tokenspeed_core.engine.messages import Ready, Submit, WorkerReady
from tokenspeed_core.engine.requests import RequestOptions
from tokenspeed_core.errors import EngineDeadError, TokenSpeedError

NUM_THREADS = 4  # for parsing, rendering and tokenizing

T = TypeVar("T")


class Connection(Protocol):
    """The connection to an engine (`EngineClient`), or to several replicas."""

    ready: asyncio.Future[Ready]
    dead: asyncio.Future[str]
    delivery: Delivery

    @property
    def state(self) -> State:
        """Whether requests can be sent."""

    def take_ids(self, count: int) -> int:
        """Allocate `count` consecutive sequence ids and return the first."""

    def submit(self, request: Submit, sinks: Sequence[Sink]) -> None:
        """Send a request; `sinks[i]` gets the tokens of sequence i. Raises RequestFailedError."""

    def abort(self, sequence_ids: Iterable[int]) -> None:
        """Abort sequences. Ids of ended sequences are ignored."""

    def send(self, message: Any) -> None:
        """Send another message."""

    def why_unhealthy(self) -> str | None:
        """Return why the engine is unhealthy, or None."""

    def close(self) -> None:
        """Close the sockets. Safe to call twice."""


class AsyncEngine:
    """Checks requests, sends them to the engine, and delivers their tokens to sinks.

    The connection calls the sinks as tokens arrive, so a token needs no task and no queue. `AsyncLLM` adds asynchronous
    iterators; an API worker adds HTTP, parsers, and a connection that chooses a replica.
    """

    def __init__(self, connection: Connection) -> None:
        """`connection` leads to an engine that may still be starting; `close` closes it."""
        self.connection = connection
        self._inputs: InputProcessor | None = None
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="text")

    @property
    def is_open(self) -> bool:
        """Whether the tokenizer and the engine are ready."""
        return self._inputs is not None

    @property
    def inputs(self) -> InputProcessor:
        """The tokenizer and the engine's limits. Raises TokenSpeedError before the engine is open."""
        if self._inputs is None:
            raise TokenSpeedError("the engine is not ready")
        return self._inputs

    async def start(
        self,
        load_text: Callable[[], ModelText],
        prepare: Callable[[ModelText], Awaitable[None]] | None = None,
    ) -> ModelText:
        """Load the tokenizer while the engine loads the model; return it when both are ready.

        The engine becomes ready only after `prepare`. The caller may check the text before it calls `open`. Raises
        CheckpointError, and EngineDeadError if the engine dies.
        """
        text = await self.in_thread(load_text)
        if prepare is not None:
            await prepare(text)
        connection = self.connection
        connection.send(WorkerReady())
        await asyncio.wait((connection.ready, connection.dead), return_when=asyncio.FIRST_COMPLETED)
        self.check_alive()
        return text

    def open(self, inputs: InputProcessor) -> None:
        """Accept requests from now on."""
        self._inputs = inputs

    def request(self, params: SamplingParams, prompt: I32, options: RequestOptions) -> Submit:
        """Return a checked request with new sequence ids, for `submit`. Raises BadRequestError."""
        first_id = self.connection.take_ids(params.n)
        return self.inputs.request(first_id, params, prompt, options)

    def submit(self, request: Submit, sinks: Sequence[Sink]) -> None:
        """Send a request; `sinks[i]` gets the tokens of sequence i. Raises RequestFailedError if the engine is dead."""
        self.connection.submit(request, sinks)

    def abort(self, sequence_ids: Iterable[int]) -> None:
        """Abort sequences. Ids of ended sequences are ignored."""
        self.connection.abort(sequence_ids)

    def check_alive(self) -> None:
        """Raise EngineDeadError if the engine died."""
        if self.connection.dead.done():
            raise EngineDeadError(f"the engine died: {self.connection.dead.result()}")

    def in_thread(self, call: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        """Return the future result of a call in a thread, while the event loop goes on."""
        return asyncio.get_running_loop().run_in_executor(self._pool, call, *arguments)

    def close(self) -> None:
        """Stop the threads and close the connection. Safe to call twice."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self.connection.close()
