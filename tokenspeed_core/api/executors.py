"""The contract of executors, which start the worker processes of an engine with several processes.

The engine's own process is rank 0. It sends every step's plan to the other ranks itself; an executor only starts their
processes, on this machine or on others, and says when one ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from tokenspeed_core.targets import load_target

Settings = Mapping[str, Any]
"""The settings that a worker process gets from its parent, as JSON: configuration, addresses of the engine, rank."""


@dataclass(frozen=True, slots=True)
class ExecutorJob:
    """The processes of an engine. Ranks fill the nodes in order; rank 0 and its node exist already."""

    num_nodes: int
    num_per_node: int
    device: str  # of --device: "auto", "cpu" or "cuda"

    @property
    def world_size(self) -> int:
        """The number of processes, with the engine's own."""
        return self.num_nodes * self.num_per_node

    def ranks_of(self, node: int) -> Sequence[int]:
        """Return the ranks of a node's worker processes, without rank 0."""
        first = node * self.num_per_node
        return range(max(1, first), first + self.num_per_node)


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """How a worker process ended, such as "was killed by SIGKILL", and the last lines of its log."""

    rank: int
    reason: str
    last_lines: tuple[str, ...]


@runtime_checkable
class Executor(Protocol):
    """Starts the ranks 1 to N - 1 of one engine.

    `host` is the name or address of this machine for workers on other machines, None if all workers run on this one.
    """

    host: str | None

    def start(self, settings: Settings, on_exit: Callable[[WorkerExit], None]) -> None:
        """Start the processes, as `WorkerProcess` does, and return at once.

        Each gets the settings with its own "rank", and with "local_rank", the number of its GPU among those that it
        sees. `on_exit` is called from any thread when a process has ended, for any reason.
        """

    def close(self, seconds: float) -> None:
        """Wait up to `seconds` for the processes to end, then kill them. Can be called twice.

        After a failure, `seconds` is 0.
        """


@dataclass(frozen=True, slots=True)
class ExecutorSpec:
    """An executor, registered in `tokenspeed.executors`. It is named by --distributed-executor-backend."""

    load: str  # "module:factory"; `factory(job: ExecutorJob)` returns an Executor

    def make(self, job: ExecutorJob) -> Executor:
        """Return the executor of a job. Raises ImportError, AttributeError, or the factory's exception."""
        executor: Executor = load_target(self.load)(job)
        return executor
