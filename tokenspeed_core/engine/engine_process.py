"""The parent's handle of an engine process: start, watch, drain, kill."""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import suppress

from tokenspeed_core.config import Config
from tokenspeed_core.engine.client import EngineClient
from tokenspeed_core.engine.messages import Drain
from tokenspeed_core.engine.subprocesses import (
    Program,
    Subprocess,
    make_private_folder,
    remove_folder,
    start,
)
from tokenspeed_core.executor.lockstep import connect_peers
from tokenspeed_core.plugins.catalog import Catalog

ENGINE_MODULE = "tokenspeed_core.engine.process"  # run as `python -m`, this is an engine process
EXIT_SECONDS = 10.0  # for a drained engine to exit


def engine_programs(config: Config, catalog: Catalog) -> list[Program]:
    """Return the programs of `--data-parallel-size` engines.

    An engine gets no settings of the server, such as API keys. Engines that share experts are connected by sockets, and
    all of them must be started.
    """
    sizes = config.parallel_sizes()
    num_sharing = sizes.num_sharing
    peers = connect_peers(num_sharing) if num_sharing > 1 else [[]] * config.data_parallel_size
    settings = {
        "config": config.for_engine().to_wire(),
        "catalog_digest": catalog.digest(),
    }
    command = (sys.executable, "-P", "-m", ENGINE_MODULE)
    name = f"rank 0 of {sizes.world_size}" if sizes.world_size > 1 else ""
    return [
        Program(
            command,
            {**settings, "replica": replica, "peers": fds},
            given_fds=[fd for fd in fds if fd >= 0],
            name=name,
        )
        for replica, fds in enumerate(peers)
    ]


class EngineProcess:
    """An engine process and the sockets of its clients. The process ends with the one that started it.

    `addresses` has the address (ipc://...) of each client's socket.
    """

    def __init__(self, program: Program, num_clients: int = 1) -> None:
        """Make the private folder of the sockets. Raises CapacityError."""
        self._folder = make_private_folder()
        self._program = program
        self.addresses = [f"ipc://{self._folder / str(number)}" for number in range(num_clients)]
        self._process: Subprocess | None = None

    async def start(self, client: EngineClient) -> None:
        """Start the process. `client` is connected to the first address."""
        # Connected sockets need no names. A process that is killed earlier leaves the folder.
        client.ready.add_done_callback(lambda _: remove_folder(self._folder))
        self._process = await start(self._program, addresses=self.addresses, worker=0)

    async def watch(self, client: EngineClient) -> None:
        """Wait for the process to end, then mark the engine as dead in the client."""
        assert self._process is not None, "watch follows start"
        name = self._program.name or "its process"
        client.die(f"{name} {await self._process.wait()}")

    async def drain(self, client: EngineClient) -> None:
        """Ask the engine to finish its requests and exit. Wait up to `EXIT_SECONDS` for that."""
        assert self._process is not None, "drain follows start"
        client.send(Drain())
        with suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), EXIT_SECONDS)

    async def kill(self) -> None:
        """Kill the process and wait for its end. Does nothing if it was not started."""
        if self._process is not None:
            self._process.send(signal.SIGKILL)
            await self._process.stop()
        remove_folder(self._folder)
