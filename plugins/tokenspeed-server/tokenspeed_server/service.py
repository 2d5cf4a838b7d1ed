"""The state of an API worker: one model, one engine, and whether requests are admitted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tokenspeed_core.api.hooks import RequestRecord
from tokenspeed_core.commands.serving import (
    AsyncEngine,
    InputProcessor,
    LogitsProcessorTable,
    ModelText,
    Ready,
    State,
)
from tokenspeed_server import body_limits
from tokenspeed_server.access import Access, split_keys
from tokenspeed_server.echo_client import EchoClient
from tokenspeed_server.errors import ApiError
from tokenspeed_server.observability import Observability
from tokenspeed_server.replicas.engines import EngineReplicas
from tokenspeed_server.reply_parsers import Parsers
from tokenspeed_server.responses_api.store import ResponseStore
from tokenspeed_server.statistics import EngineMonitors
from tokenspeed_server.unknown_fields import IgnoredFieldsLog, Policy

MAX_FAILURES = 8  # in a row, after which the server is unhealthy


@dataclass(frozen=True, slots=True)
class Options:
    """How the server answers, and its limits. `None` computes a limit from the context length."""

    model_name: str
    api_key: str | None = field(default=None, repr=False)
    stream_interval: int = 1
    reports_cached_tokens: bool = True
    has_priorities: bool = False
    observers: tuple[Callable[[RequestRecord], None], ...] = ()  # called when a request ends
    parsers: Parsers = (None, None)
    processors: LogitsProcessorTable = field(default_factory=LogitsProcessorTable)
    response_store: Path | None = None  # a file shared with the other API workers
    max_body_bytes: int | None = None
    max_body_values: int | None = None
    max_sequences: int = 1024  # of a request
    max_unsent_bytes: int = 8 * 2**20  # of the events that a client has not read
    request_timeout: float | None = None  # in seconds
    drain_timeout: float = 300.0  # in seconds
    allowed_hosts: tuple[str, ...] = ()
    unknown_fields: Policy = "warn"
    root_path: str = ""
    allowed_origins: tuple[str, ...] = ()
    created: int = 0  # when the model was made, in seconds of Unix time
    logs_exchanges: bool = True  # one line per HTTP request
    request_log_level: int | None = None  # --log-requests-level; None: requests are not logged

    @property
    def access(self) -> Access:
        """Who may use the server."""
        return Access(split_keys(self.api_key), self.allowed_hosts, self.allowed_origins)


class Service:
    """Admits requests while the engine is ready and the server is not draining."""

    def __init__(
        self,
        options: Options,
        connection: EngineReplicas | EchoClient,
        observability: Observability | None = None,
    ) -> None:
        self.options = options
        self.engine = AsyncEngine(connection)
        self.observability = observability or Observability()
        if isinstance(connection, EngineReplicas):
            if observability is None:
                self.observability.monitor = EngineMonitors(len(connection.clients))
            connection.on_heartbeat = self.observability.note_heartbeat
            connection.on_death = self.observability.monitor.forget
        self.is_draining = False
        self.num_active = 0
        self.ignored_fields = IgnoredFieldsLog()
        self.response_store = ResponseStore(options.response_store)
        self._num_failures = 0  # requests in a row that failed within the server
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def inputs(self) -> InputProcessor:
        """The tokenizer and the engine's limits. Raises ApiError (503) while the server starts."""
        if not self.engine.is_open:
            raise ApiError(
                503, "the server is starting", code="starting", headers={"retry-after": "1"}
            )
        return self.engine.inputs

    @property
    def max_body_bytes(self) -> int:
        """The limit of a body's size. Raises ApiError (503) while the server starts."""
        given = self.options.max_body_bytes
        return body_limits.max_bytes(self.inputs.limits.longest) if given is None else given

    @property
    def max_body_values(self) -> int:
        """The limit of a body's values. Raises ApiError (503) while the server starts."""
        given = self.options.max_body_values
        return body_limits.max_cost(self.inputs.limits.longest) if given is None else given

    def open(self, text: ModelText, ready: Ready) -> None:
        """Start to admit requests."""
        options = self.options
        self.engine.open(InputProcessor(text, ready, options.processors, options.has_priorities))

    def why_not_alive(self) -> str | None:
        """Return why the process should be restarted, or None."""
        if self.engine.connection.state is State.STARTING:
            return None
        if self._num_failures >= MAX_FAILURES:
            return f"the last {self._num_failures} requests failed within the server; see its log"
        return self.engine.connection.why_unhealthy()

    def note_end(self, *, has_failed: bool) -> None:
        """Count a request that was answered, or that failed within the server."""
        self._num_failures = self._num_failures + 1 if has_failed else 0

    def why_not_ready(self) -> str | None:
        """Return why requests should go elsewhere, or None."""
        if self.is_draining:
            return "the server is shutting down"
        reason = self.why_not_alive() or self.engine.connection.why_unhealthy()
        if reason is None and not self.engine.is_open:
            return "the server is starting"
        return reason

    def check_open(self) -> None:
        """Raise ApiError (503) unless requests are admitted."""
        if self.engine.connection.state is State.DEAD:
            raise ApiError(503, "the engine is dead and the server is exiting", code="engine_dead")
        if self.is_draining:
            raise ApiError(
                503, "the server is shutting down", code="draining", headers={"retry-after": "5"}
            )
        _ = self.inputs

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Count a request as active: a drain waits for it. Raises ApiError as `check_open` does."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def enter(self) -> None:
        """Count a request as active until `leave` is called. Raises ApiError as `check_open` does."""
        self.check_open()
        self.num_active += 1
        self._idle.clear()

    def leave(self) -> None:
        """Count a request as over."""
        self.num_active -= 1
        if not self.num_active:
            self._idle.set()

    async def drained(self) -> None:
        """Admit no more requests and wait until the active ones are answered."""
        self.is_draining = True
        await self._idle.wait()

    def close(self) -> None:
        """Stop the threads, close the connection, and forget the stored responses."""
        self.engine.close()
        self.response_store.close()
