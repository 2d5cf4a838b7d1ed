"""Rank 0's view of the other ranks: it starts them, sends them messages, and detects failures.

Messages to the ranks are encoded once and published. Reports and exits arrive in a separate thread, because a step
may block for as long as its collectives wait for a rank that died.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import zmq

from tokenspeed_core.api.executors import Executor, ExecutorJob, ExecutorSpec, Settings, WorkerExit
from tokenspeed_core.config import Config
from tokenspeed_core.config.parallel_settings import LOCAL
from tokenspeed_core.engine.subprocesses import make_private_folder, remove_folder
from tokenspeed_core.engine.wire import WireError, pack
from tokenspeed_core.errors import ConfigError, EngineDeadError
from tokenspeed_core.executor.local import LocalExecutor
from tokenspeed_core.executor.lockstep import Peers
from tokenspeed_core.executor.messages import Joined, Offer, RankFailed, to_rank_zero
from tokenspeed_core.executor.model_files import find_differences
from tokenspeed_core.executor.nodes import NOTICE_SECONDS, NodesExecutor
from tokenspeed_core.plugins.catalog import Catalog, make
from tokenspeed_core.plugins.entry import Entry
from tokenspeed_core.resolved import Resolved

CLOSE_SECONDS = 5.0  # for the ranks to exit
# A lost rank ends the collectives of the others before its end is noticed. They wait before they report an error.
ATTRIBUTION_SECONDS = 1.0
REPORT_SECONDS = 1.0  # until rank 0 has read the reports
LAST_REPORT_SECONDS = 0.25  # for the report of a rank that has ended
log = logging.getLogger("tokenspeed.executor")


class Ranks:
    """The ranks 1 to N - 1.

    Only the thread that created the object may call it, except `wait_for_failure` and `kill`.
    """

    def __init__(
        self,
        executor: Executor,
        world_size: int,
        peers: Peers | None = None,
        attribution_seconds: float = ATTRIBUTION_SECONDS,
        folder: Path | None = None,
    ) -> None:
        """Bind the sockets, in a new folder within `folder`. Raises CapacityError.

        `peers` are the engines that share the experts. A rank that has ended is noticed within `attribution_seconds`.
        """
        self.world_size = world_size
        self.attribution_seconds = attribution_seconds
        self._peers = peers
        self.failure: str | None = None
        self.host = executor.host
        self._executor = executor
        self._folder = make_private_folder(folder)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._plans = self._bind(zmq.XPUB, "plans")
        self._reports = self._bind(zmq.PULL, "reports")
        # One end of each pipe is polled; closing the other end makes it readable.
        self.failure_fd, self._failed = os.pipe()
        self._stopped, self._stop = os.pipe()
        self._changed = threading.Condition()
        self._joined: dict[int, Mapping[str, str]] = {}  # the digests of the model files by rank
        self._offers: dict[int, int] = {}
        self._on_failure: Callable[[str], None] = lambda reason: None
        self._abort: Callable[[], None] = lambda: None
        self._leave: Callable[[], None] = lambda: None
        self._is_closing = False
        self._aborting = threading.Thread(target=self._end_collectives, name="abort", daemon=True)
        self._thread = threading.Thread(target=self._receive, name="ranks", daemon=True)

    @property
    def addresses(self) -> dict[str, str]:
        """The addresses that the workers connect to."""
        return {
            "plans": self._plans.getsockopt_string(zmq.LAST_ENDPOINT),
            "reports": self._reports.getsockopt_string(zmq.LAST_ENDPOINT),
        }

    @property
    def rendezvous(self) -> str:
        """The address at which all ranks meet: a file, or a host and a free port."""
        if self.host is None:
            return f"file://{self._folder}/rendezvous"
        return f"tcp://{self.host}"

    def start(self, settings: Settings, on_failure: Callable[[str], None]) -> None:
        """Start the ranks. `on_failure` is called once, from another thread, when one fails."""
        self._on_failure = on_failure
        self._thread.start()
        self._executor.start({**settings, **self.addresses}, self._note_exit)

    def use(self, *, abort: Callable[[], None], leave: Callable[[], None]) -> None:
        """Set the functions that end waiting collectives after a failure, and the communication in `close`."""
        self._abort, self._leave = abort, leave

    def wait_joined(self, files: Mapping[str, str]) -> None:
        """Wait until all ranks listen. Raises EngineDeadError, also if a rank has other model files than `files`."""
        poller = zmq.Poller()
        poller.register(self._plans, zmq.POLLIN)
        poller.register(self.failure_fd, zmq.POLLIN)
        for _ in range(1, self.world_size):
            readable = [each for each, _ in poller.poll()]
            if self.failure_fd in readable:
                break
            self._plans.recv()  # a subscription
        self._wait(lambda: len(self._joined) == self.world_size - 1)
        for rank, theirs in sorted(self._joined.items()):
            if different := find_differences(files, theirs):
                self._fail(
                    f"rank {rank} of {self.world_size} has another model than rank 0 (different: {different}). "
                    "Copy the same model to all nodes."
                )
                raise EngineDeadError(self.failure)

    def broadcast(self, message: Any) -> None:
        """Send a message to all ranks."""
        self._plans.send(pack(message))

    def gather_min(self, value: int) -> int:
        """Return the minimum of this value and the values of the other ranks. Raises EngineDeadError."""
        self._wait(lambda: len(self._offers) == self.world_size - 1)
        offers, self._offers = self._offers, {}
        return min(value, *offers.values())

    def wait_for_failure(self, seconds: float) -> str | None:
        """Wait until a rank failed. Return why, or None."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None, seconds)
        return self.failure

    def wait_for_lost_rank(self) -> str | None:
        """Return why a rank failed, after a collective did. Waits until a lost rank must have been noticed."""
        return self.wait_for_failure(self.attribution_seconds + REPORT_SECONDS)

    def remove_folder(self) -> None:
        """Delete the folder of the sockets, once all are connected, so that a killed process leaves no files."""
        remove_folder(self._folder)

    def kill(self) -> None:
        """Kill the ranks, which makes steps that wait for them fail."""
        self._executor.close(0.0)

    def close(self) -> None:
        """End the ranks and wait for them. Those that do not exit in time, or after a failure, are killed."""
        if self._is_closing:
            return
        self._is_closing = True
        with self._changed:  # a failure starts the thread before it releases the lock
            has_failed = self.failure is not None
        if has_failed:
            self._aborting.join(CLOSE_SECONDS)
        if not self._aborting.is_alive():
            self._leave()
        self._executor.close(0.0 if has_failed else CLOSE_SECONDS)
        os.close(self._stop)
        self._thread.join()
        if self.failure is None:
            os.close(self._failed)
        for fd in (self.failure_fd, self._stopped):
            os.close(fd)
        for socket in (self._plans, self._reports):
            socket.close(linger=0)
        self._context.term()
        remove_folder(self._folder)

    def _bind(self, kind: int, name: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(0)
        if kind == zmq.XPUB:
            socket.setsockopt(zmq.XPUB_VERBOSE, 1)  # a message for each subscriber
        socket.bind(f"ipc://{self._folder}/{name}" if self.host is None else f"tcp://{self.host}:*")
        return socket

    def _wait(self, until: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None or until())
        if self.failure is not None:
            raise EngineDeadError(self.failure)

    def _receive(self) -> None:
        """Read reports until `close`."""
        poller = zmq.Poller()
        poller.register(self._reports, zmq.POLLIN)
        poller.register(self._stopped, zmq.POLLIN)
        while True:
            if self._stopped in [each for each, _ in poller.poll()]:
                return
            try:
                message = to_rank_zero.unpack(self._reports.recv())
            except WireError as error:
                log.error("unreadable message from a rank: %s", error)
                continue
            match message:
                case Joined():
                    with self._changed:
                        self._joined[message.rank] = message.files
                        self._changed.notify_all()
                case Offer():
                    with self._changed:
                        self._offers[message.rank] = message.value
                        self._changed.notify_all()
                case RankFailed():
                    # The end of another engine makes the collectives of this rank fail.
                    lost = None if self._peers is None else self._peers.failure
                    self._fail(
                        lost
                        or f"rank {message.rank} of {self.world_size} failed: {message.message}"
                    )

    def _note_exit(self, end: WorkerExit) -> None:
        # Its report has more to say, but another thread reads it.
        if not self._is_closing:
            self.wait_for_failure(LAST_REPORT_SECONDS)
        lines = "".join(f"\n  {line}" for line in end.last_lines)
        said = f". Its last log lines:{lines}" if lines else ""
        self._fail(f"rank {end.rank} of {self.world_size} {end.reason}{said}")

    def _fail(self, reason: str) -> None:
        """Record the first failure, end waiting calls, and report it. Later failures are ignored."""
        with self._changed:
            if self._is_closing or self.failure is not None:
                return
            self.failure = reason
            os.close(self._failed)
            self._changed.notify_all()
            self._aborting.start()
        if self._peers is not None:
            self._peers.fail(reason)
        self._on_failure(reason)

    def _end_collectives(self) -> None:
        """End the collectives that wait for the lost rank. NCCL returns only after captured graphs are freed."""
        self._abort()


def start_ranks(
    resolved: Resolved,
    catalog: Catalog,
    on_failure: Callable[[str], None],
    peers: Peers | None = None,
    folder: Path | None = None,
) -> Ranks | None:
    """Start the other ranks of an engine; None if it is one process. Raises PluginError, ConfigError, CapacityError.

    `peers` are the engines that share the experts. Sockets are made within `folder`.
    """
    config = resolved.config
    if config.node_rank:
        raise ConfigError(
            f"--node-rank {config.node_rank}: this node only runs workers for node 0. Start it with `tokenspeed serve`."
        )
    sizes = config.parallel_sizes()
    if sizes.world_size == 1:
        return None
    job = ExecutorJob(sizes.num_nodes, sizes.num_per_node, config.device)
    seconds = ATTRIBUTION_SECONDS if job.num_nodes == 1 else NOTICE_SECONDS
    executor = _make_executor(resolved, job, catalog)
    ranks = Ranks(executor, job.world_size, peers, seconds, folder)
    settings = {
        "config": config.resolved(model=str(resolved.checkpoint.path)).to_wire(),
        "catalog_digest": catalog.digest(),
        "num_threads": resolved.num_threads,
        "replica": resolved.replica,
        "attribution_seconds": seconds,
    }
    try:
        ranks.start(settings, on_failure)
    except BaseException:
        ranks.close()
        raise
    return ranks


def find_executor(config: Config, catalog: Catalog) -> tuple[Entry, ExecutorSpec] | None:
    """Return the plugin that --distributed-executor-backend names; None: the built-in one. Raises PluginError."""
    name = config.distributed_executor_backend
    if name == LOCAL:
        return None
    entry = catalog.get("executors", name, flag="--distributed-executor-backend")
    return entry, catalog.need(entry, ExecutorSpec)


def _make_executor(resolved: Resolved, job: ExecutorJob, catalog: Catalog) -> Executor:
    """Return the executor of a job. Raises PluginError, CapacityError."""
    if resolved.executor is None:
        if job.num_nodes == 1:
            return LocalExecutor(job)
        return NodesExecutor(job, resolved.config, catalog.versions())
    entry, spec = resolved.executor
    return make(entry, spec.load, lambda: spec.make(job), Executor)  # type: ignore[type-abstract]
