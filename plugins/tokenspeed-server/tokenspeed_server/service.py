"""The state of an API worker: one model, one engine, and whether requests are admitted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

from tokenspeed_core.api.hooks import RequestRecord
from tokenspeed_core.commands.serving import (
    ChatTemplate,
    Defaults,
    EngineClient,
    Parsers,
    Ready,
    State,
    Tokenizer,
)
from tokenspeed_server.errors import ApiError


@dataclass(frozen=True, slots=True)
class Options:
    """How the server answers. `max_body_bytes` bounds a request's body."""

    model_name: str
    api_key: str | None = field(default=None, repr=False)
    stream_interval: int = 1
    reports_cached_tokens: bool = True
    has_priorities: bool = False
    observers: tuple[Callable[[RequestRecord], None], ...] = ()  # called when a request ends
    parsers: Parsers = (None, None)
    max_body_bytes: int = 32 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ModelText:
    """The model's tokenizer, chat template and default sampling. Without a tokenizer, only ids pass."""

    tokenizer: Tokenizer | None
    template: ChatTemplate | None
    defaults: Defaults


@dataclass(frozen=True, slots=True)
class Serving:
    """What is known once both the tokenizer and the engine are ready."""

    text: ModelText
    limits: Ready


class Service:
    """Admits requests while the engine is ready and the server is not draining."""

    def __init__(self, options: Options, engine: EngineClient) -> None:
        self.options = options
        self.engine = engine
        self.is_draining = False
        self.num_active = 0
        self.pool = ThreadPoolExecutor(max_workers=4, thread_name_prefix="text")
        self._serving: Serving | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def is_open(self) -> bool:
        """Whether the tokenizer and the engine became ready."""
        return self._serving is not None

    @property
    def serving(self) -> Serving:
        """What requests need. Raises ApiError (503) while the server starts."""
        if self._serving is None:
            raise ApiError(
                503, "the server is starting", code="starting", headers={"retry-after": "1"}
            )
        return self._serving

    def open(self, text: ModelText, ready: Ready) -> None:
        """Start to admit requests."""
        self._serving = Serving(text, ready)

    def why_unhealthy(self) -> str | None:
        """Return why requests should go elsewhere, or None."""
        if self.is_draining:
            return "the server is shutting down"
        reason = self.engine.why_unhealthy()
        if reason is None and self._serving is None:
            return "the server is starting"
        return reason

    def check_open(self) -> None:
        """Raise ApiError (503) unless requests are admitted."""
        if self.engine.state is State.DEAD:
            raise ApiError(503, "the engine is dead and the server exits", code="engine_dead")
        if self.is_draining:
            raise ApiError(
                503, "the server is shutting down", code="draining", headers={"retry-after": "5"}
            )
        _ = self.serving

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Count a request as active: a drain waits for it. Raises ApiError as `check_open` does."""
        self.check_open()
        self.num_active += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.num_active -= 1
            if not self.num_active:
                self._idle.set()

    async def drained(self) -> None:
        """Admit no more requests and wait until the active ones are answered."""
        self.is_draining = True
        await self._idle.wait()

    def close(self) -> None:
        """Stop the threads that parse and tokenise."""
        self.pool.shutdown(wait=False, cancel_futures=True)
