"""The engine and the application of a batch, in the order of a server's start, without a socket."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, Any

from tokenspeed_core.commands.serving import (
    EngineDeadError,
    Hooks,
    ModelText,
    Program,
    discover,
    engine_programs,
    resolve_checkpoint,
)
from tokenspeed_server import asgi
from tokenspeed_server.app import create_app
from tokenspeed_server.batch.files import (
    check_paths,
    file_runner,
    run_on_files,
    stop,
    stop_on_signals,
)
from tokenspeed_server.batch.runner import Counts
from tokenspeed_server.replicas.engines import EngineReplicas
from tokenspeed_server.reply_parsers import find_parsers
from tokenspeed_server.serve import load_model_text, make_options
from tokenspeed_server.service import Options, Service
from tokenspeed_server.settings import ServerConfig
from tokenspeed_server.supervisor import Supervisor


def run(config: ServerConfig, source: Path, target: Path, *, overwrite: bool) -> int:
    """Answer the requests of a file; return the exit status: 0 if all succeeded, 1 if some failed.

    Raises ConfigError for wrong paths, and TokenSpeedError when the engine cannot start or dies.
    """
    check_paths(source, target, overwrite=overwrite)
    catalog = discover(config)
    hooks = Hooks.load(catalog)
    config = hooks.adjust_config(config)
    find_parsers(config, catalog)
    checkpoint = resolve_checkpoint(config, catalog)
    settled = config.resolved(
        model=str(checkpoint.path),
        served_model_name=config.served_model_name or checkpoint.name,
        api_workers=1,
        api_key=None,
    )
    options = replace(make_options(settled, catalog, hooks, checkpoint), logs_exchanges=False)
    batch = Batch(
        engine_programs(settled, catalog),
        options,
        hooks,
        concurrency=2 * settled.max_num_seqs * settled.data_parallel_size,
    )

    async def answer(reading: IO[bytes], writing: IO[bytes]) -> bool:
        return await batch.run(lambda: load_model_text(settled, checkpoint), reading, writing)

    return run_on_files(source, target, answer, lambda: batch.counts, overwrite=overwrite)


class Batch:
    """The processes of one batch."""

    def __init__(
        self, programs: Sequence[Program], options: Options, hooks: Hooks, *, concurrency: int
    ) -> None:
        self.counts = Counts()
        self._programs = programs
        self._options = options
        self._hooks = hooks
        self._concurrency = concurrency

    async def run(
        self, load_text: Callable[[], ModelText], reading: IO[bytes], writing: IO[bytes]
    ) -> bool:
        """Answer the lines of `reading`; return whether all were answered.

        Raises EngineDeadError. Leaves no process behind.
        """
        stopped = stop_on_signals()  # the end of the engine stops the run too
        processes = Supervisor(self._programs, ())
        client = EngineReplicas(processes.addresses, memory=processes.memory)

        def end(_: asyncio.Future[str]) -> None:
            processes.ask_to_stop(signal.SIGINT)  # the other engines end too
            stop(stopped)

        for each in client.clients:
            each.dead.add_done_callback(end)
        service = Service(self._options, client)
        watch: asyncio.Task[None] | None = None
        try:
            await processes.start(client)
            watch = asyncio.create_task(processes.watch_engines(client))
            is_whole = await self._open(service, client, load_text, stopped) and await self._answer(
                service, stopped, reading, writing
            )
            for replica, each in enumerate(client.clients):
                if each.dead.done():
                    name = client.name_of(replica)
                    raise EngineDeadError(f"{name} ended: {each.dead.result()}")
            if is_whole:
                await processes.retire(client)
            return is_whole
        finally:
            if watch is not None:
                watch.cancel()
            await processes.stop()
            service.close()

    async def _open(
        self,
        service: Service,
        engine: EngineReplicas,
        load_text: Callable[[], ModelText],
        stopped: asyncio.Future[None],
    ) -> bool:
        """Load the tokenizer while the engine loads; return whether requests can be answered."""
        opening = asyncio.ensure_future(service.engine.start(load_text))
        events: list[asyncio.Future[Any]] = [opening, stopped]
        await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
        if stopped.done():
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)
            return False
        service.open(opening.result(), engine.ready.result())
        return True

    async def _answer(
        self,
        service: Service,
        stopped: asyncio.Future[None],
        reading: IO[bytes],
        writing: IO[bytes],
    ) -> bool:
        runner, bar = file_runner(
            partial(asgi.post, create_app(service, self._hooks.add_middleware)),
            reading,
            writing,
            concurrency=self._concurrency,
            max_body_bytes=service.max_body_bytes,
        )
        self.counts = runner.counts
        with bar:
            return await runner.run(stopped)
