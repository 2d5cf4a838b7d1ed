"""The processes beside an API worker: the engine, and the other workers, which the first one starts and ends."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Sequence
from contextlib import suppress

from tokenspeed_core.commands.serving import Drain, EngineClient, EngineDeadError
from tokenspeed_server.subprocesses import Child, PrivateFolder, Program, start

ENGINE_EXIT_SECONDS = 10.0
log = logging.getLogger(__name__)


class Crew:
    """What any worker but the first has: nobody, and a pipe that closes when the engine or the first one is gone."""

    def __init__(self, worker: int, address: str, pipe: int) -> None:
        """`worker` is its own number, `address` that of its socket to the engine."""
        self.worker, self.address = worker, address
        self.watches: list[
            asyncio.Task[None]
        ] = []  # of the other workers: one that ends too early raises
        self._pipe = pipe

    async def start(self, link: EngineClient) -> None:
        """Start whom it is to start."""

    async def watch_engine(self, link: EngineClient) -> None:
        """Tell the link when the engine's process ends."""
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(self._pipe))
        await reader.read()
        link.die("it has ended")

    def ask_to_stop(self, by: signal.Signals) -> None:
        """Have the others drain, by SIGTERM, or end at once, by SIGINT."""

    async def retire(self, link: EngineClient) -> None:
        """Wait until the others have drained, then let the engine finish what it has and go."""

    async def stop(self) -> None:
        """End the engine at once; return when nothing is left. The others have answered those who waited for it."""


class Chief(Crew):
    """What the first worker has: the engine and all other workers."""

    def __init__(self, engine: Program, others: Sequence[Program]) -> None:
        """Start nothing yet. Raises CapacityError."""
        self._folder = PrivateFolder()
        self._programs = (engine, *others)
        self._addresses = [
            f"ipc://{self._folder.path / str(worker)}" for worker in range(len(self._programs))
        ]
        super().__init__(0, self._addresses[0], -1)
        self._children: list[Child] = []  # the engine, then the workers from number 1 on
        self._is_draining = self._is_stopping = False

    async def start(self, link: EngineClient) -> None:
        """Start the engine and the others."""
        # Once all are connected nobody looks for the sockets' names: a kill from then on leaves no file.
        link.ready.add_done_callback(lambda _: self._folder.remove())
        for number, program in enumerate(self._programs):
            self._children.append(await start(program, addresses=self._addresses, worker=number))
        self.watches += [
            asyncio.create_task(self._watch(number)) for number in range(1, len(self._children))
        ]

    async def _watch(self, number: int) -> None:
        how = await self._children[number].wait()
        if not (
            self._is_stopping or (self._is_draining and not self._children[number].has_crashed)
        ):
            told = f"API worker {number} of {len(self._children)} {how}"
            log.error("%s; the others finish what they have, then the server ends", told)
            raise EngineDeadError(told)

    async def watch_engine(self, link: EngineClient) -> None:
        """Tell the link when the engine's process ends."""
        link.die(f"its process {await self._children[0].wait()}")

    def ask_to_stop(self, by: signal.Signals) -> None:
        """Have the others drain, by SIGTERM, or end at once, by SIGINT."""
        self._is_draining, self._is_stopping = True, self._is_stopping or by is signal.SIGINT
        for child in self._children[1:]:
            child.send(by)

    async def retire(self, link: EngineClient) -> None:
        """Wait until the others have drained, then let the engine finish what it has and go."""
        if any(await asyncio.gather(*self.watches, return_exceptions=True)):
            return  # nobody reads the answers to what a dead worker asked for
        link.send(Drain())
        with suppress(TimeoutError):
            await asyncio.wait_for(self._children[0].wait(), ENGINE_EXIT_SECONDS)

    async def stop(self) -> None:
        """End the engine at once; return when nothing is left. The others have answered those who waited for it."""
        self._is_stopping = True
        for engine in self._children[:1]:
            engine.send(signal.SIGKILL)
        await asyncio.gather(*(child.stop() for child in self._children))
        self._folder.remove()
