"""The life of an API worker: start, serve, drain, end. One coroutine waits for events."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from tokenspeed_core.commands.serving import EngineDeadError, ModelText, RequestFailedError
from tokenspeed_server.app import Wrap, create_app
from tokenspeed_server.connections import Connection, ConnectionLimits
from tokenspeed_server.observability import Observability
from tokenspeed_server.replicas.engines import EngineReplicas
from tokenspeed_server.service import Options, Service
from tokenspeed_server.supervisor import Supervised
from tokenspeed_server.warmup import check_vocabulary, warm_up

STOPPED = "the server was interrupted twice and stopped at once"
FLUSH_SECONDS = 5  # for answers in progress when the engine dies
MAX_ACCEPTS = 8  # connections that are accepted before other events
KERNEL_BACKLOG = 2048  # connections that may wait to be accepted
UNREAD_SECONDS = 20  # that a drain waits for clients to read finished answers

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """How to run an API worker. `wrap` adds the middleware of plugins."""

    socket: socket.socket
    options: Options
    load_text: Callable[[], ModelText]
    log_level: str = "info"
    on_ready: Callable[[ModelText], None] = lambda text: None
    wrap: Wrap | None = None
    observability: Observability | None = None
    certificate: str | None = None  # file of a certificate chain, for HTTPS
    key: str | None = None  # file of its key, if it is not the same
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)


def serve(config: WorkerConfig, processes: Supervised) -> int:
    """Serve until interrupted; return the exit status.

    Raises EngineDeadError when the engine or another worker dies.
    """
    gc.freeze()  # collections need not look at the imported modules, which take a tenth of a second
    return asyncio.run(ApiWorker(config, processes).run())


def _http_config(app: ASGIApp, config: WorkerConfig) -> uvicorn.Config:
    http = uvicorn.Config(
        app,
        lifespan="off",
        log_config=None,
        # At "info", uvicorn logs its own start.
        log_level="debug" if config.log_level == "debug" else "warning",
        access_log=False,  # `Exchange` logs requests
        server_header=False,
        date_header=False,
        ws="none",
        http=partial(Connection, limits=config.connections),  # type: ignore[arg-type]
        # asyncio accepts this many connections in one iteration, which delays streams.
        backlog=MAX_ACCEPTS,
        h11_max_incomplete_event_size=config.connections.max_header_bytes,
        timeout_keep_alive=75,
        ssl_certfile=config.certificate,
        ssl_keyfile=config.key,
        timeout_graceful_shutdown=FLUSH_SECONDS,
    )
    logging.getLogger("tokenspeed.http").setLevel(config.log_level.upper())
    return http


class ApiWorker:
    """One run of an API worker."""

    def __init__(self, config: WorkerConfig, processes: Supervised) -> None:
        self._config = config
        self._processes = processes
        self._engine: EngineReplicas | None = None
        self._signals: list[signal.Signals] = []
        self._interrupted = asyncio.Event()
        self._interrupted_again = asyncio.Event()

    async def run(self) -> int:
        """Run from start to end; return the exit status. Leaves no process or folder behind."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            # nohup ignores SIGHUP.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self._on_signal, number)
        processes, config = self._processes, self._config
        engine = EngineReplicas(processes.addresses, processes.worker, processes.memory)
        self._engine = engine
        service = Service(config.options, engine, config.observability)
        sockets = [config.socket]
        http: uvicorn.Server | None = None
        try:
            http = uvicorn.Server(_http_config(create_app(service, config.wrap), config))
            # Not uvicorn's `serve`, which handles signals without a drain and polls.
            http.config.load()
            http.lifespan = http.config.lifespan_class(http.config)
            await http.startup(sockets)
            config.socket.listen(KERNEL_BACKLOG)
            await processes.start(engine)
            return await self._live(service, engine)
        finally:
            await processes.stop()
            if http is not None and http.started:
                http.force_exit = self._interrupted_again.is_set()
                await http.shutdown(sockets)
            service.close()

    async def _live(self, service: Service, engine: EngineReplicas) -> int:
        other_workers = self._processes.watches
        watch = asyncio.create_task(self._processes.watch_engines(engine))
        opening = asyncio.create_task(self._open(service, engine))
        ends: list[asyncio.Future[Any]] = [engine.dead, watch, *other_workers]
        try:
            await _first(*ends, opening, self._interrupted.wait())
            if opening.done():
                opening.result()  # raises if the tokenizer could not be loaded
                await _first(*ends, self._interrupted.wait())
        finally:
            opening.cancel()
        if watch.done() and watch.exception() is None:
            await _first(engine.dead, self._interrupted.wait())  # the loop may report it later
        is_drained = not engine.dead.done() and await self._drain(service, engine)
        if not watch.done():
            watch.cancel()
        if self._interrupted_again.is_set():
            self._processes.ask_to_stop(signal.SIGINT)
            return 128 + self._signals[-1]
        if is_drained:
            await asyncio.gather(*other_workers)  # raises EngineDeadError if one died
            if watch.done() and not watch.cancelled():
                watch.result()  # raises it if one of several engines died
            return 0
        what = "died" if engine.ready.done() else "could not start"
        raise EngineDeadError(f"the engine {what}: {engine.dead.result()}")

    async def _open(self, service: Service, engine: EngineReplicas) -> None:
        """Load the tokenizer while the engine loads, then admit requests."""
        warm = partial(warm_up, self._config.options)
        try:
            text = await service.engine.start(self._config.load_text, warm)
        except EngineDeadError:
            return  # `_live` reports it
        ready = engine.ready.result()
        await service.engine.in_thread(check_vocabulary, text, ready)
        gc.collect()
        gc.freeze()  # collections need not look at the objects that exist now
        service.open(text, ready)
        self._config.on_ready(text)

    async def _drain(self, service: Service, engine: EngineReplicas) -> bool:
        """Finish the active requests and end the engine. Return whether all of that worked."""
        processes = self._processes
        processes.ask_to_stop(signal.SIGTERM)
        if not processes.worker:
            is_busy = service.num_active or engine.has_work
            log.warning("draining; interrupt again to stop immediately" if is_busy else "stopping")
        drained = asyncio.create_task(service.drained())
        unread = asyncio.create_task(_only_unread(engine))
        deadline = asyncio.create_task(asyncio.sleep(service.options.drain_timeout))
        ends = (drained, unread, engine.dead)
        await _first(*ends, self._interrupted_again.wait(), deadline)
        if deadline.done() and not any(end.done() for end in ends):
            log.warning(
                "--drain-timeout expired; ending %d unfinished requests", service.num_active
            )
            engine.fail_all(RequestFailedError("draining", "the server is shutting down"))
            flushed = asyncio.sleep(FLUSH_SECONDS)
            await _first(drained, engine.dead, self._interrupted_again.wait(), flushed)
            unread = asyncio.create_task(asyncio.sleep(0))
            await unread
        deadline.cancel()
        unread.cancel()
        if not drained.done():
            drained.cancel()
            if not unread.done():
                return False
            log.warning(
                "%d clients stopped reading their responses; closing their connections",
                service.num_active,
            )
        if not service.engine.is_open:
            return True
        await _first(processes.retire(engine), engine.dead, self._interrupted_again.wait())
        # If another worker still runs, the engine died while that worker needed it.
        return all(watch.done() for watch in processes.watches)

    def _on_signal(self, number: signal.Signals) -> None:
        self._signals.append(number)
        if self._processes.worker:
            # It gets SIGTERM from the service manager and the first worker, SIGINT when that one is
            # interrupted again. The second signal may be delivered before the first.
            is_final = number is signal.SIGINT
        else:
            is_final = self._interrupted.is_set()
        if is_final:
            self._interrupted_again.set()
            if self._engine is not None:
                # At once: the end of the engine's process must not look like its death.
                self._engine.die(STOPPED, RequestFailedError("stopped", STOPPED))
        self._interrupted.set()


async def _only_unread(engine: EngineReplicas) -> None:
    """Return when the engine has been idle for a while, so that only unread responses remain."""
    since = time.monotonic()
    while time.monotonic() - since < UNREAD_SECONDS:
        await asyncio.sleep(1)
        if engine.num_live:
            since = time.monotonic()


async def _first(*awaitables: Awaitable[Any]) -> None:
    """Wait for the first of several. Tasks and futures go on; coroutines are cancelled."""
    made = [asyncio.ensure_future(each) for each in awaitables]
    try:
        await asyncio.wait(made, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task, given in zip(made, awaitables, strict=True):
            if task is not given:
                task.cancel()
