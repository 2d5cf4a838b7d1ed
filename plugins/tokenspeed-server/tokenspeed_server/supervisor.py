"""How API workers relate to the other processes: the first worker starts and ends all others."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Sequence

from tokenspeed_core.commands.serving import (
    EngineDeadError,
    EngineProcess,
    Program,
    Subprocess,
    start_subprocess,
)
from tokenspeed_server.replicas.engines import EngineReplicas
from tokenspeed_server.replicas.memory import ReplicaMemory

SIGNAL_SECONDS = 0.1
log = logging.getLogger(__name__)


class Supervised:
    """A secondary API worker. It starts no processes; its pipe closes when the server ends."""

    def __init__(
        self, worker: int, addresses: Sequence[str], pipe: int, memory: ReplicaMemory
    ) -> None:
        """Take the worker's number, the address of its socket to each engine, its pipe, and shared memory."""
        self.worker = worker
        self.addresses = addresses
        self.memory = memory
        self.watches: list[asyncio.Task[None]] = []  # raise if another worker ends too early
        self._pipe = pipe

    async def start(self, engines: EngineReplicas) -> None:
        """Start the other processes."""

    async def watch_engines(self, engines: EngineReplicas) -> None:
        """Tell the clients when their engines' processes end. Raises EngineDeadError if others still run."""
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(self._pipe))
        while line := await reader.readline():
            engines.clients[int(line)].die("its process ended")
        # If the user stopped the server, a signal was sent before the pipe was closed, but the loop may
        # report it later.
        await asyncio.sleep(SIGNAL_SECONDS)
        engines.die("its process ended")

    def ask_to_stop(self, number: signal.Signals) -> None:
        """Have the other workers drain (SIGTERM) or end at once (SIGINT)."""

    async def retire(self, engines: EngineReplicas) -> None:
        """Wait until the other workers have drained, then drain the engines."""

    async def stop(self) -> None:
        """Kill the engines, stop the other workers, and wait for their end."""


class Supervisor(Supervised):
    """The first API worker. It starts the engines and the other workers."""

    def __init__(
        self,
        engines: Sequence[Program],
        workers: Sequence[Program],
        memory: ReplicaMemory | None = None,
    ) -> None:
        """Make the folders of the sockets. `memory` is shared with the workers. Raises CapacityError."""
        num_workers = 1 + len(workers)
        self._engines = [EngineProcess(each, num_workers) for each in engines]
        self._programs = tuple(workers)
        addresses = [engine.addresses[0] for engine in self._engines]
        super().__init__(0, addresses, -1, memory or ReplicaMemory(num_workers, len(engines)))
        self._workers: list[Subprocess] = []  # from number 1 on
        self._is_draining = False
        self._is_stopping = False
        self._is_retiring = False  # the engines are asked to end

    async def start(self, engines: EngineReplicas) -> None:
        """Start the engines and the other workers."""
        for engine, client in zip(self._engines, engines.clients, strict=True):
            await engine.start(client)
        for number, program in enumerate(self._programs, 1):
            addresses = [engine.addresses[number] for engine in self._engines]
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

    async def watch_engines(self, engines: EngineReplicas) -> None:
        """Tell the clients when their engines' processes end. Raises EngineDeadError if others still run."""
        numbers = range(len(self._engines))
        await asyncio.gather(*(self._watch_engine(number, engines) for number in numbers))

    async def _watch_engine(self, number: int, engines: EngineReplicas) -> None:
        client = engines.clients[number]
        await self._engines[number].watch(client)
        await asyncio.sleep(0)  # `engines` may be dead now
        if self._is_retiring or self._is_stopping or engines.dead.done():
            return
        for worker in self._workers:
            worker.tell(str(number))
        reason = f"{engines.name_of(number)} died: {client.dead.result()}"
        log.error("%s; the server ends when the others have answered", reason)
        raise EngineDeadError(reason)

    def ask_to_stop(self, number: signal.Signals) -> None:
        """Have the other workers drain (SIGTERM) or end at once (SIGINT)."""
        self._is_draining = True
        self._is_stopping = self._is_stopping or number is signal.SIGINT
        for worker in self._workers:
            worker.send(number)

    async def retire(self, engines: EngineReplicas) -> None:
        """Wait until the other workers have drained, then drain the engines."""
        if any(await asyncio.gather(*self.watches, return_exceptions=True)):
            return  # the engines may have requests of a worker that died
        self._is_retiring = True
        pairs = zip(self._engines, engines.clients, strict=True)
        drains = (engine.drain(client) for engine, client in pairs if not client.dead.done())
        await asyncio.gather(*drains)

    async def stop(self) -> None:
        """Kill the engines, stop the other workers, and wait for their end."""
        self._is_stopping = True
        kills = (engine.kill() for engine in self._engines)
        await asyncio.gather(*kills, *(worker.stop() for worker in self._workers))
