"""The built-in executor: one subprocess for each rank of this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from tokenspeed_core.api.executors import ExecutorJob, Settings, WorkerExit
from tokenspeed_core.executor.worker_process import WorkerProcess


class LocalExecutor:
    """Starts the ranks of one node as subprocesses."""

    host: str | None = None

    def __init__(self, job: ExecutorJob, node: int = 0) -> None:
        """Start nothing yet."""
        self._ranks = job.ranks_of(node)
        self._first = node * job.num_per_node
        self._workers: Sequence[WorkerProcess] = ()

    def start(self, settings: Settings, on_exit: Callable[[WorkerExit], None]) -> None:
        """Start the processes."""
        self._workers = [
            WorkerProcess({**settings, "rank": rank, "local_rank": rank - self._first}, on_exit)
            for rank in self._ranks
        ]

    def close(self, seconds: float) -> None:
        """Wait up to `seconds` for the processes to end, then kill them."""
        end = time.monotonic() + seconds
        for worker in self._workers:
            worker.close(max(0.0, end - time.monotonic()))
