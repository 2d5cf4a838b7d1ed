"""The life of an API worker: start, ready, drain, death. One coroutine, a few events, no polling."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import uvicorn

from tokenspeed_core.commands.serving import EngineClient, EngineDeadError, WorkerReady
from tokenspeed_server.app import AsgiApp, Gate, Routes
from tokenspeed_server.service import ModelText, Options, Service
from tokenspeed_server.supervisor import Crew

FLUSH_SECONDS = 5  # for answers under way when the engine died
UNREAD_SECONDS = 20  # that a drain waits for clients to read what the engine has finished

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Launch:
    """What a worker is started with."""

    socket: socket.socket
    options: Options
    load_text: Callable[[], ModelText]
    log_level: str = "info"
    on_ready: Callable[[ModelText], None] = lambda text: None
    wrap: Callable[[AsgiApp], AsgiApp] = lambda app: (
        app
    )  # plugins' middleware, behind the key's check


def serve(launch: Launch, crew: Crew) -> int:
    """Serve until told to stop; return the exit status. Raises EngineDeadError when the engine or a worker dies."""
    return asyncio.run(_Life(launch, crew).run())


def _http_config(app: AsgiApp, launch: Launch) -> uvicorn.Config:
    config = uvicorn.Config(
        app,
        lifespan="off",
        log_config=None,
        log_level="debug"
        if launch.log_level == "debug"
        else "warning",  # at "info" it narrates its own start
        access_log=launch.log_level in ("debug", "info"),
        server_header=False,
        date_header=False,
        ws="none",
        http="h11",  # bounds a request's head; with httptools headers without end fill the memory
        timeout_keep_alive=75,
        timeout_graceful_shutdown=FLUSH_SECONDS,
    )
    logging.getLogger("uvicorn.access").setLevel(launch.log_level.upper())
    return config


class _Life:
    """One run of a worker."""

    def __init__(self, launch: Launch, crew: Crew) -> None:
        self._launch, self._crew = launch, crew
        self._signals: list[signal.Signals] = []
        self._asked_to_stop = asyncio.Event()
        self._asked_twice = asyncio.Event()

    async def run(self) -> int:
        """Run from start to end; return the exit status. However it ends, nothing is left behind."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        crew = self._crew
        link = EngineClient(crew.address, worker=crew.worker)
        service = Service(self._launch.options, link)
        app = Gate(self._launch.wrap(Routes(service)), self._launch.options.api_key)
        http = uvicorn.Server(_http_config(app, self._launch))
        sockets = [self._launch.socket]
        try:
            # Its parts, not its `serve`: that would handle signals, which do not drain, and tick ten times a second.
            http.config.load()
            http.lifespan = http.config.lifespan_class(http.config)
            await http.startup(sockets)
            await crew.start(link)
            return await self._live(service)
        finally:
            await crew.stop()
            http.force_exit = self._asked_twice.is_set()
            if http.started:
                await http.shutdown(sockets)
            service.close()
            link.close()

    async def _live(self, service: Service) -> int:
        link, watches = service.link, self._crew.watches  # of the other workers
        watch = asyncio.create_task(self._crew.watch_engine(link))
        opening = asyncio.create_task(self._open(service))
        try:
            await _first(link.dead, opening, *watches, self._asked_to_stop.wait())
            if opening.done():
                opening.result()  # raises what kept the text side from loading
                await _first(link.dead, *watches, self._asked_to_stop.wait())
        finally:
            opening.cancel()
        is_drained = not link.dead.done() and await self._drain(service)
        watch.cancel()
        if self._asked_twice.is_set():
            self._crew.ask_to_stop(signal.SIGINT)
            link.die("it was told to stop at once")  # those who wait for answers hear of it
            return 128 + self._signals[-1]
        if is_drained:
            await asyncio.gather(*watches)  # raises EngineDeadError for a worker that died
            return 0
        raise EngineDeadError(
            f"the engine {'died' if link.ready.done() else 'could not start'}: {link.dead.result()}"
        )

    async def _open(self, service: Service) -> None:
        """Load the text side while the engine loads, then begin to take requests."""
        text = await asyncio.to_thread(self._launch.load_text)
        service.link.send(WorkerReady())
        ready = await asyncio.shield(service.link.ready)
        gc.collect()
        gc.freeze()  # what was made so far stays: no collection during a stream need look at it again
        service.open(text, ready)
        self._launch.on_ready(text)

    async def _drain(self, service: Service) -> bool:
        """Take no more requests, finish those that run, let the engine go. Return whether all that worked."""
        self._crew.ask_to_stop(signal.SIGTERM)
        if (service.num_active or service.link.has_work) and not self._crew.worker:
            with suppress(OSError):  # the disk that the log is on may be full
                print("draining; interrupt again to stop at once", file=sys.stderr, flush=True)
        drained = asyncio.create_task(service.drained())
        unread = asyncio.create_task(_only_unread(service.link))
        await _first(drained, unread, service.link.dead, self._asked_twice.wait())
        unread.cancel()
        if not drained.done():
            drained.cancel()
            if not unread.done():
                return False
            log.warning("%d clients do not read their answers; they are left", service.num_active)
        if service.serving is None:
            return True
        await _first(self._crew.retire(service.link), service.link.dead, self._asked_twice.wait())
        return all(
            watch.done() for watch in self._crew.watches
        )  # if not, the engine died before what they finish

    def _on_signal(self, number: signal.Signals) -> None:
        self._signals.append(number)
        # A worker beside the first may get a service manager's SIGTERM, and that with which the first one answers it.
        if self._asked_to_stop.is_set() and not (self._crew.worker and number is signal.SIGTERM):
            self._asked_twice.set()
        self._asked_to_stop.set()


async def _only_unread(link: EngineClient) -> None:
    """Return when the engine has had nothing to do for a while: what is left waits for clients that do not read."""
    since = time.monotonic()
    while time.monotonic() - since < UNREAD_SECONDS:
        await asyncio.sleep(1)
        if link.num_live:
            since = time.monotonic()


async def _first(*awaitables: Awaitable[Any]) -> None:
    """Wait for the first of several; tasks and futures among them go on, coroutines are cancelled."""
    made = [asyncio.ensure_future(each) for each in awaitables]
    try:
        await asyncio.wait(made, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task, given in zip(made, awaitables, strict=True):
            if task is not given:
                task.cancel()
