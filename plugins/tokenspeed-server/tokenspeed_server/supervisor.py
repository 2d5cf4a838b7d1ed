"""How API workers relate to the other processes: the first worker starts and ends all others."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Sequence

from tokenspeed_core.commands.serving import (
    EngineDeadError,
    EngineProcess,
    Program,
    State,
    Subprocess,
    start_subprocess,
)
from tokenspeed_server.replicas.engines import EngineReplicas
from tokenspeed_server.replicas.memory import ReplicaMemory
from tokenspeed_server.replicas.stalls import StallLog

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
        """Tell the clients when their engines' processes end, and connect them to those that replace them."""
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(self._pipe))
        while line := await reader.readline():
            number, *address = line.decode().rstrip("\n").split(" ", 1)
            if address:
                engines.replace(int(number), address[0])
            else:
                engines.clients[int(number)].die("its process ended")
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
        may_restart: Callable[[], bool] = lambda: False,
    ) -> None:
        """Make the folders of the sockets. `memory` is shared with the workers. Raises CapacityError.

        `may_restart` says whether one of several engines that was ready and died starts again, while others go on.
        """
        num_workers = 1 + len(workers)
        self._engine_programs, self._may_restart = tuple(engines), may_restart
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
        log.error(
            "%s; the server exits when the other workers have finished their requests", reason
        )
        raise EngineDeadError(reason)

    async def watch_engines(self, engines: EngineReplicas) -> None:
        """Tell the clients when their engines' processes end, and start them again if that is allowed.

        Logs when an engine stalls. Raises EngineDeadError if one ended for good, and others still run.
        """
        stalls = asyncio.create_task(StallLog(engines).run())
        numbers = range(len(self._engines))
        try:
            await asyncio.gather(*(self._watch_engine(number, engines) for number in numbers))
        finally:
            stalls.cancel()

    async def _watch_engine(self, number: int, engines: EngineReplicas) -> None:
        while True:
            client = engines.clients[number]
            await self._engines[number].watch(client)
            await asyncio.sleep(0)  # `engines` may be dead now
            if self._is_retiring or self._is_stopping or engines.dead.done():
                return
            for worker in self._workers:
                worker.tell(str(number))
            reason = f"{engines.name_of(number)} died: {client.dead.result()}"
            if self._is_draining or not client.ready.done() or not self._may_restart():
                log.error(
                    "%s; the server exits when the other engines have finished their requests",
                    reason,
                )
                raise EngineDeadError(reason)
            log.error("%s; it restarts while the other engines continue", reason)
            await self._restart(number, engines)

    async def _restart(self, number: int, engines: EngineReplicas) -> None:
        """Start an engine again. All workers connect to its new sockets."""
        engine = EngineProcess(self._engine_programs[number], 1 + len(self._workers))
        self._engines[number] = engine
        for worker, address in zip(self._workers, engine.addresses[1:], strict=True):
            worker.tell(f"{number} {address}")
        client = engines.replace(number, engine.addresses[0])
        client.ready.add_done_callback(
            lambda _: log.info("%s is ready again", engines.name_of(number))
        )
        await engine.start(client)

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
        drains = (engine.drain(client) for engine, client in pairs if client.state is State.READY)
        await asyncio.gather(*drains)

    async def stop(self) -> None:
        """Kill the engines, stop the other workers, and wait for their end."""
        self._is_stopping = True
        kills = (engine.kill() for engine in self._engines)
        await asyncio.gather(*kills, *(worker.stop() for worker in self._workers))
