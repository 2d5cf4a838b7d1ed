"""Engines over several nodes that are started one by one: `tokenspeed serve` on each, with its `--node-rank`.

Node 0 serves. Every other node joins it at `--dist-init-addr`, starts its ranks, and reports their ends. Each
of them and node 0 exchange heartbeats, so that each ends when the other is lost.
"""

from __future__ import annotations

import json
import logging
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any
from uuid import uuid4

import zmq

from tokenspeed_core.api.executors import ExecutorJob, Settings, WorkerExit
from tokenspeed_core.config import Config
from tokenspeed_core.config.describe import as_written
from tokenspeed_core.config.settings import flag
from tokenspeed_core.engine.wire import Codec, Message, WireError, pack
from tokenspeed_core.errors import CapacityError, ConfigError, EngineDeadError
from tokenspeed_core.executor.local import LocalExecutor
from tokenspeed_core.plugins.catalog import Catalog

ALIVE_SECONDS = 1.0  # between heartbeats
LOST_SECONDS = 3.0  # without a heartbeat
NOTICE_SECONDS = LOST_SECONDS + 0.5  # until node 0 has noticed that a node is lost
TICK_MS = 100
CLOSE_SECONDS = 5.0
_MAY_DIFFER = {
    "model",
    "revision",
    "download_dir",
    "tokenizer",
    "speculative_draft_model_path",
    "node_rank",
    "log_level",
}
log = logging.getLogger("tokenspeed.executor")


class NodeJoin(Message, frozen=True, tag="join"):
    """A node asks for its ranks. `config` is its configuration as JSON, `versions` are those of `Catalog.versions`."""

    node: int
    config: str
    versions: dict[str, str]


class NodeAlive(Message, frozen=True, tag="alive"):
    """A heartbeat: from a node to node 0, or the answer."""

    node: int


class RankEnded(Message, frozen=True, tag="ended"):
    """A rank of a node has ended."""

    rank: int
    reason: str
    last_lines: tuple[str, ...]


class NodeStart(Message, frozen=True, tag="start"):
    """Start the node's ranks with these settings, JSON."""

    settings: str


class NodeRefused(Message, frozen=True, tag="refused"):
    """The node cannot join, or does not belong to this node 0; `message` says why."""

    message: str


class NodeStop(Message, frozen=True, tag="stop"):
    """End the node's ranks, and exit."""

    has_failed: bool


_to_node_zero = Codec(NodeJoin, NodeAlive, RankEnded)
_to_node = Codec(NodeAlive, NodeStart, NodeRefused, NodeStop)


class NodesExecutor:
    """The executor of node 0: its own ranks are subprocesses, and the other nodes join."""

    def __init__(self, job: ExecutorJob, config: Config, versions: Mapping[str, str]) -> None:
        """Listen at `--dist-init-addr`. `versions` are those of `Catalog.versions`. Raises CapacityError."""
        assert config.dist_init_addr is not None, "checked with the settings"
        host, _, port = config.dist_init_addr.rpartition(":")
        self.host: str | None = _address_of(host)
        self._job = job
        self._config = config
        self._versions = versions
        self._local = LocalExecutor(job)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # for nodes that connect again
        try:
            self._socket.bind(f"tcp://{self.host}:{port}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise CapacityError(
                f"--dist-init-addr {config.dist_init_addr}: node 0 cannot listen there: {error}. "
                "Give an address of this machine and a free port."
            ) from error
        self._settings = ""
        self._on_exit: Callable[[WorkerExit], None] = lambda end: None
        self._alive_at: dict[int, float] = {}
        self._identities: dict[int, bytes] = {}
        self._is_closing = threading.Event()
        self._has_failed = False
        self._thread = threading.Thread(target=self._serve, name="nodes", daemon=True)

    def start(self, settings: Settings, on_exit: Callable[[WorkerExit], None]) -> None:
        """Start the ranks of this node, and the ranks of other nodes when they join."""
        self._settings, self._on_exit = json.dumps(settings), on_exit
        self._local.start(settings, on_exit)
        log.info(
            "node 0 of %d waits for the other nodes at %s (%s)",
            self._job.num_nodes,
            self._config.dist_init_addr,
            self.host,
        )
        self._thread.start()

    def close(self, seconds: float) -> None:
        """End the ranks of all nodes."""
        if self._is_closing.is_set():
            return
        self._has_failed = seconds == 0
        self._is_closing.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._local.close(seconds)
        self._context.destroy(linger=1000)

    def _serve(self) -> None:
        while not self._is_closing.is_set():
            if self._socket.poll(TICK_MS):
                identity, *frames = self._socket.recv_multipart()
                try:
                    self._answer(identity, _to_node_zero.unpack(b"".join(frames)))
                except WireError as error:
                    log.error("unreadable message at --dist-init-addr: %s", error)
            now = time.monotonic()
            for node, alive_at in list(self._alive_at.items()):
                if now - alive_at > LOST_SECONDS:
                    del self._alive_at[node]
                    rank = self._job.ranks_of(node)[0]
                    reason = f"is lost: its node {node} sent no heartbeat for {LOST_SECONDS:.0f} s"
                    self._on_exit(WorkerExit(rank, reason, ()))
        for identity in self._identities.values():
            self._socket.send_multipart([identity, pack(NodeStop(self._has_failed))])

    def _answer(self, identity: bytes, message: NodeJoin | NodeAlive | RankEnded) -> None:
        match message:
            case NodeJoin(node):
                refusal = self._refuse(identity, message)
                if refusal is None and node not in self._identities:
                    log.info("node %d of %d joined", node, self._job.num_nodes)
                    self._identities[node] = identity
                    self._alive_at[node] = time.monotonic()
                answer = NodeStart(self._settings) if refusal is None else NodeRefused(refusal)
                self._socket.send_multipart([identity, pack(answer)])
            case NodeAlive(node):
                reply: NodeAlive | NodeRefused = message
                if self._identities.get(node) != identity:
                    reply = NodeRefused("node 0 has started again. Start this node again, too.")
                elif node in self._alive_at:
                    self._alive_at[node] = time.monotonic()
                self._socket.send_multipart([identity, pack(reply)])
            case RankEnded() if identity in self._identities.values():
                end = WorkerExit(message.rank, message.reason, message.last_lines)
                self._on_exit(end)
            case RankEnded():
                pass  # from a node that has joined the predecessor of this node 0

    def _refuse(self, identity: bytes, message: NodeJoin) -> str | None:
        """Return why a node cannot join, or None."""
        node = message.node
        if not 0 < node < self._job.num_nodes:
            return f"--node-rank {node}: node 0 has --nnodes {self._job.num_nodes}"
        if self._identities.get(node, identity) != identity:
            return f"--node-rank {node}: another node with this rank has joined. Give each node a different rank."
        for name in sorted({*self._versions, *message.versions}):
            if self._versions.get(name) != message.versions.get(name):
                return (
                    f"{name} {message.versions.get(name, 'is not installed')} on node {node} and "
                    f"{self._versions.get(name, 'is not installed')} on node 0. Install the same versions on all nodes."
                )
        ours, theirs = _comparable(self._config), json.loads(message.config)
        for name in sorted({*ours, *theirs}):
            if ours.get(name) != theirs.get(name):
                return (
                    f"{flag(name)} is {as_written(theirs.get(name))} on node {node} and "
                    f"{as_written(ours.get(name))} on node 0. Give all nodes the same settings."
                )
        return None


def run_node(config: Config, catalog: Catalog) -> int:
    """Run the ranks of a node other than 0 until node 0 ends. Return the exit status.

    `config` is resolved, and its model is a path.

    Raises ConfigError if node 0 refuses this node, and EngineDeadError if a rank fails or node 0 is lost or has started
    again.
    """
    sizes = config.parallel_sizes()
    job = ExecutorJob(sizes.num_nodes, sizes.num_per_node, config.device)
    node = _Node(config, LocalExecutor(job, config.node_rank), job.ranks_of(config.node_rank)[0])

    def stop(number: int, frame: FrameType | None) -> None:
        node.is_stopped = True

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        node.run(catalog)
    finally:
        node.close()
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0


class _Node:
    """A node that joins node 0."""

    def __init__(self, config: Config, local: LocalExecutor, first_rank: int) -> None:
        self.is_stopped = False
        self._first_rank = first_rank
        self._config = config
        self._local = local
        self._ends: queue.SimpleQueue[WorkerExit] = queue.SimpleQueue()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, uuid4().hex.encode())
        host, _, port = str(self._config.dist_init_addr).rpartition(":")
        self._host = _address_of(host)
        self._socket.connect(f"tcp://{self._host}:{port}")

    def run(self, catalog: Catalog) -> None:
        """Join, start the ranks, and wait for the end of node 0 or of a rank."""
        number, address = self._config.node_rank, self._config.dist_init_addr
        log.info("node %d is connecting to node 0 at %s (%s)", number, address, self._host)
        join = NodeJoin(number, json.dumps(_comparable(self._config)), catalog.versions())
        said_at, heard_at, has_started = 0.0, time.monotonic(), False
        while not self.is_stopped:
            now = time.monotonic()
            if now - said_at >= ALIVE_SECONDS:
                said_at = now
                self._socket.send(pack(NodeAlive(number) if has_started else join))
            while not self._ends.empty():
                end = self._ends.get()
                self._socket.send(pack(RankEnded(end.rank, end.reason, end.last_lines)))
            if has_started and now - heard_at > LOST_SECONDS:
                raise EngineDeadError(
                    f"node 0 at {address} sent no heartbeat for {LOST_SECONDS:.0f} s"
                )
            if not self._socket.poll(TICK_MS):
                continue
            heard_at = time.monotonic()
            match _to_node.unpack(self._socket.recv()):
                case NodeStop(has_failed):
                    if has_failed:
                        raise EngineDeadError(
                            "a rank on another node failed; see the log of node 0"
                        )
                    return
                case NodeRefused(message):
                    raise EngineDeadError(message) if has_started else ConfigError(message)
                case NodeStart(settings) if not has_started:
                    has_started = True
                    log.info("node %d is starting its ranks", number)
                    config = {"config": self._config.to_wire(), "catalog_digest": catalog.digest()}
                    self._local.start({**json.loads(settings), **config}, self._ends.put)
        if has_started:
            self._socket.send(
                pack(RankEnded(self._first_rank, f"was stopped with its node {number}", ()))
            )

    def close(self) -> None:
        """End the ranks."""
        self._local.close(CLOSE_SECONDS)
        self._context.destroy(linger=1000)


def _comparable(config: Config) -> dict[str, Any]:
    """Return the settings that must be the same on all nodes."""
    values = config.to_wire()["values"]
    if values["speculative_config"] is not None:
        values["speculative_config"]["model"] = None
    return {
        name: value
        for name, value in values.items()
        if name not in _MAY_DIFFER and not config.metadata(name)["is_for_servers"]
    }


def _address_of(host: str) -> str:
    """Return the IPv4 address of a host. Raises ConfigError."""
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise ConfigError(
            f"--dist-init-addr: cannot find an IPv4 address of the host {host!r}: {error}"
        ) from error
