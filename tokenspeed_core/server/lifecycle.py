"""The life of the API process: start, ready, drain, death. One coroutine, a few events, no polling."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import uvicorn

from tokenspeed_core.errors import EngineDeadError
from tokenspeed_core.server.app import AsgiApp, Gate, Routes
from tokenspeed_core.server.engine_link import EngineLink
from tokenspeed_core.server.engine_process import EngineProcess, PrivateFolder
from tokenspeed_core.server.service import ModelText, Options, Service

FLUSH_SECONDS = 5       # for answers under way when the engine died
UNREAD_SECONDS = 20     # that a drain waits for clients to read what the engine has finished
ENGINE_EXIT_SECONDS = 10.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Launch:
    """What a server is started with. `engine_config` and `catalog_digest` are for the engine only."""

    socket: socket.socket
    options: Options
    load_text: Callable[[], ModelText]
    engine_config: Mapping[str, Any]
    catalog_digest: str
    log_level: str = "info"
    engine_command: Sequence[str] | None = None
    on_ready: Callable[[Service], None] = lambda service: None
    wrap: Callable[[AsgiApp], AsgiApp] = lambda app: app  # plugins' middleware, behind the key's check


class _Http(uvicorn.Server):
    """uvicorn without its signal handlers, which would not drain, and without its ten ticks a second."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._told_to_stop = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        await self._told_to_stop.wait()

    def stop(self) -> None:
        """Close idle connections, finish the others, and return from `serve`."""
        self.should_exit = True
        self._told_to_stop.set()


def serve(launch: Launch) -> int:
    """Serve until told to stop; return the exit status. Raises EngineDeadError when the engine dies."""
    return asyncio.run(_Life(launch).run())


def _http_config(app: AsgiApp, launch: Launch) -> uvicorn.Config:
    is_verbose = launch.log_level == "debug"
    config = uvicorn.Config(
        app, lifespan="off", log_config=None,
        log_level="debug" if is_verbose else "warning",  # at "info" it narrates its own start
        access_log=launch.log_level in ("debug", "info"), server_header=False, date_header=False, ws="none",
        http="h11",  # bounds a request's head; with httptools headers without end fill the memory
        timeout_keep_alive=75, timeout_graceful_shutdown=FLUSH_SECONDS,
    )
    logging.getLogger("uvicorn.access").setLevel(launch.log_level.upper())
    return config


class _Life:
    """One run of a server."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._signals: list[signal.Signals] = []
        self._asked_to_stop = asyncio.Event()
        self._asked_twice = asyncio.Event()

    async def run(self) -> int:
        """Run from start to end; return the exit status. However it ends, nothing is left behind."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        folder = PrivateFolder()
        try:
            return await self._run_in(folder)
        finally:
            folder.remove()

    async def _run_in(self, folder: PrivateFolder) -> int:
        engine = EngineProcess(folder.path, self._launch.engine_command)
        link = EngineLink(engine.address)
        # Once the engine has connected nobody looks for the socket's name: a kill from then on leaves no file.
        link.ready.add_done_callback(lambda _: folder.remove())
        service = Service(self._launch.options, link)
        app = Gate(self._launch.wrap(Routes(service)), self._launch.options.api_key)
        http = _Http(_http_config(app, self._launch))
        serving = asyncio.create_task(http.serve(sockets=[self._launch.socket]))
        try:
            await engine.start(self._launch.engine_config, self._launch.catalog_digest)
            return await self._live(service, engine, http, serving)
        finally:
            engine.kill()
            http.stop()
            with suppress(asyncio.CancelledError):
                await serving
            await engine.stop()
            service.close()
            link.close()

    async def _live(
        self, service: Service, engine: EngineProcess, http: _Http, serving: asyncio.Task[None]
    ) -> int:
        link = service.link
        watch = asyncio.create_task(_watch(engine, link))
        opening = asyncio.create_task(self._open(service))
        try:
            await _first(link.dead, serving, opening, self._asked_to_stop.wait())
            if opening.done():
                opening.result()  # raises what kept the text side from loading
                await _first(link.dead, serving, self._asked_to_stop.wait())
        finally:
            opening.cancel()
        if serving.done():
            serving.result()
            return 1
        is_drained = not link.dead.done() and await self._drain(service, watch)
        if self._asked_twice.is_set():
            http.force_exit = True
            return 128 + self._signals[-1]
        if is_drained:
            return 0
        what = "died" if link.ready.done() else "could not start"
        raise EngineDeadError(f"the engine {what}: {link.dead.result()}")

    async def _open(self, service: Service) -> None:
        """Load the text side while the engine loads, then begin to take requests."""
        text = await asyncio.to_thread(self._launch.load_text)
        ready = await asyncio.shield(service.link.ready)
        gc.collect()
        gc.freeze()  # what was made so far stays: no collection during a stream need look at it again
        service.open(text, ready)
        self._launch.on_ready(service)

    async def _drain(self, service: Service, watch: asyncio.Task[None]) -> bool:
        """Take no more requests, finish those that run, let the engine go. Return whether all that worked."""
        if service.num_active:
            with suppress(OSError):  # the disk that the log is on may be full
                print(
                    f"draining: {service.num_active} requests are running; interrupt again to stop at once",
                    file=sys.stderr, flush=True,
                )
        drained = asyncio.create_task(service.drained())
        unread = asyncio.create_task(_only_unread(service.link))
        await _first(drained, unread, service.link.dead, self._asked_twice.wait())
        unread.cancel()
        if not drained.done():
            drained.cancel()
            if not unread.done():
                return False
            log.warning("%d clients do not read their answers; they are left", service.num_active)
        if service.serving is not None:
            service.link.drain()
            await _first(watch, self._asked_twice.wait(), asyncio.sleep(ENGINE_EXIT_SECONDS))
        return True

    def _on_signal(self, number: signal.Signals) -> None:
        self._signals.append(number)
        if self._asked_to_stop.is_set():
            self._asked_twice.set()
        self._asked_to_stop.set()


async def _watch(engine: EngineProcess, link: EngineLink) -> None:
    """Tell the link when the engine's process ends."""
    how = await engine.wait()
    link.die(f"its process {how}")


async def _only_unread(link: EngineLink) -> None:
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
