"""How API workers relate to the other processes: the first worker starts and ends all others."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Sequence
from contextlib import suppress

from tokenspeed_core.commands.serving import Drain, EngineClient, EngineDeadError
from tokenspeed_server.subprocesses import (
    Program,
    Subprocess,
    make_private_folder,
    remove_folder,
    start,
)

ENGINE_EXIT_SECONDS = 10.0
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
        self._folder = make_private_folder()
        self._programs = (engine, *workers)
        self._addresses = [
            f"ipc://{self._folder / str(worker)}" for worker in range(len(self._programs))
        ]
        super().__init__(0, self._addresses[0], -1)
        self._children: list[Subprocess] = []  # the engine, then the workers from 1 on
        self._is_draining = False
        self._is_stopping = False

    async def start(self, engine: EngineClient) -> None:
        """Start the engine and the other workers."""
        # Connected sockets need no names. A server that is killed earlier leaves the folder.
        engine.ready.add_done_callback(lambda _: remove_folder(self._folder))
        for number, program in enumerate(self._programs):
            self._children.append(await start(program, addresses=self._addresses, worker=number))
        self.watches += [
            asyncio.create_task(self._watch(number)) for number in range(1, len(self._children))
        ]

    async def _watch(self, number: int) -> None:
        child = self._children[number]
        how = await child.wait()
        if self._is_stopping or (self._is_draining and not child.has_crashed):
            return
        reason = f"API worker {number} of {len(self._children)} {how}"
        log.error("%s; the server ends when the other workers have answered", reason)
        raise EngineDeadError(reason)

    async def watch_engine(self, engine: EngineClient) -> None:
        """Tell the client when the engine's process ends."""
        engine.die(f"its process {await self._children[0].wait()}")

    def ask_to_stop(self, number: signal.Signals) -> None:
        """Have the other workers drain (SIGTERM) or end at once (SIGINT)."""
        self._is_draining = True
        self._is_stopping = self._is_stopping or number is signal.SIGINT
        for child in self._children[1:]:
            child.send(number)

    async def retire(self, engine: EngineClient) -> None:
        """Wait until the other workers have drained, then drain the engine."""
        if any(await asyncio.gather(*self.watches, return_exceptions=True)):
            return  # the engine may have requests of a worker that died
        engine.send(Drain())
        with suppress(TimeoutError):
            await asyncio.wait_for(self._children[0].wait(), ENGINE_EXIT_SECONDS)

    async def stop(self) -> None:
        """Kill the engine, stop the other workers, and wait for their end."""
        self._is_stopping = True
        for engine in self._children[:1]:
            engine.send(signal.SIGKILL)
        await asyncio.gather(*(child.stop() for child in self._children))
        remove_folder(self._folder)
