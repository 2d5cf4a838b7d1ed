"""How API workers relate to the other processes: the first worker starts and ends all others."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Sequence

from tokenspeed_core.commands.serving import (
    EngineClient,
    EngineDeadError,
    EngineProcess,
    Program,
    Subprocess,
    start_subprocess,
)

SIGNAL_SECONDS = 0.1
log = logging.getLogger(__name__)


class Supervised:
    """A secondary API worker. It starts no processes; its pipe closes when the server ends."""

    def __init__(self, worker: int, address: str, pipe: int) -> None:
        """Take the worker's number, the address of its socket to the engine, and its pipe."""
        self.worker = worker
        self.address = address
        self.watches: list[asyncio.Task[None]] = []  # raise if another worker ends too early
        self._pipe = pipe

    async def start(self, engine: EngineClient) -> None:
        """Start the other processes."""

    async def watch_engine(self, engine: EngineClient) -> None:
        """Tell the client when the engine's process ends."""
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(self._pipe))
        await reader.read()
        # If the user stopped the server, a signal was sent before the pipe was closed, but the loop may
        # report it later.
        await asyncio.sleep(SIGNAL_SECONDS)
        engine.die("its process ended")

    def ask_to_stop(self, number: signal.Signals) -> None:
        """Have the other workers drain (SIGTERM) or end at once (SIGINT)."""

    async def retire(self, engine: EngineClient) -> None:
        """Wait until the other workers have drained, then drain the engine."""

    async def stop(self) -> None:
        """Kill the engine, stop the other workers, and wait for their end."""


class Supervisor(Supervised):
    """The first API worker. It starts the engine and the other workers."""

    def __init__(self, engine: Program, workers: Sequence[Program]) -> None:
        """Make the folder of the sockets. Raises CapacityError."""
        self._engine = EngineProcess(engine, 1 + len(workers))
        self._programs = tuple(workers)
        super().__init__(0, self._engine.addresses[0], -1)
        self._workers: list[Subprocess] = []  # from number 1 on
        self._is_draining = False
        self._is_stopping = False

    async def start(self, engine: EngineClient) -> None:
        """Start the engine and the other workers."""
        await self._engine.start(engine)
        addresses = self._engine.addresses
        for number, program in enumerate(self._programs, 1):
            self._workers.append(
                await start_subprocess(program, addresses=addresses, worker=number)
            )
        self.watches += [
            asyncio.create_task(self._watch(number, worker))
            for number, worker in enumerate(self._workers, 1)
        ]

    async def _watch(self, number: int, worker: Subprocess) -> None:
        how = await worker.wait()
        if self._is_stopping or (self._is_draining and not worker.has_crashed):
            return
        reason = f"API worker {number} of {1 + len(self._workers)} {how}"
        log.error("%s; the server ends when the other workers have answered", reason)
        raise EngineDeadError(reason)

    async def watch_engine(self, engine: EngineClient) -> None:
        """Tell the client when the engine's process ends."""
        await self._engine.watch(engine)

    def ask_to_stop(self, number: signal.Signals) -> None:
        """Have the other workers drain (SIGTERM) or end at once (SIGINT)."""
        self._is_draining = True
        self._is_stopping = self._is_stopping or number is signal.SIGINT
        for worker in self._workers:
            worker.send(number)

    async def retire(self, engine: EngineClient) -> None:
        """Wait until the other workers have drained, then drain the engine."""
        if any(await asyncio.gather(*self.watches, return_exceptions=True)):
            return  # the engine may have requests of a worker that died
        await self._engine.drain(engine)

    async def stop(self) -> None:
        """Kill the engine, stop the other workers, and wait for their end."""
        self._is_stopping = True
        await asyncio.gather(self._engine.kill(), *(worker.stop() for worker in self._workers))
