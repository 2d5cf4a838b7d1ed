"""The executor: a placement group with a bundle on each node, and an actor for each rank but 0."""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tokenspeed_core.api import ExecutorJob, Settings, WorkerExit
from tokenspeed_core.commands.workers import WorkerProcess

PLACEMENT_SECONDS = 60.0
CONNECT_SECONDS = 5.0
TICK_SECONDS = 0.2


class Worker:
    """The actor of a rank: it starts the rank's process on its node and waits for it."""

    def __init__(self, settings: Settings) -> None:
        """Start the process. Ray shows it only the GPUs of this actor."""
        self._ends: queue.SimpleQueue[WorkerExit] = queue.SimpleQueue()
        self._process = WorkerProcess(settings, self._ends.put)

    def wait(self) -> tuple[str, tuple[str, ...]]:
        """Wait for the end of the process; return the reason and the end of its log."""
        end = self._ends.get()
        return end.reason, end.last_lines

    def close(self, seconds: float) -> None:
        """Wait at most `seconds` for the end of the process, then kill it."""
        self._process.close(seconds)


def _check_address(address: str) -> None:
    """Raise ConnectionError if nothing listens at the cluster's address. Ray would try to connect for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdecimal():  # "", "auto", "local": Ray looks on this node
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        raise ConnectionError(
            f"no Ray cluster answers at RAY_ADDRESS={address}: {error}. Start Ray there, or change RAY_ADDRESS"
        ) from error


class Holder:
    """The actor that holds the GPU of rank 0. Ray did not start the process of rank 0."""

    def gpu_ids(self) -> list[str]:
        """Return the GPUs that Ray reserved."""
        return [str(each) for each in ray.get_gpu_ids()]


class RayExecutor:
    """Starts the ranks of an engine as actors."""

    def __init__(self, job: ExecutorJob) -> None:
        """Connect to the cluster of this node, or start one. Raises RayError, ConnectionError or TimeoutError."""
        self._owns_connection = not ray.is_initialized()
        if self._owns_connection:
            _check_address(os.environ.get("RAY_ADDRESS", ""))
            ray.init(configure_logging=False, log_to_driver=True)
        self._job = job
        address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self.host: str | None = None if job.num_nodes == 1 else address
        resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
        has_gpus = job.device != "cpu" and resources.get("GPU", 0) > 0
        self._demand: dict[str, float] = {"CPU": 1.0, **({"GPU": 1.0} if has_gpus else {})}
        bundle = {name: count * job.num_per_node for name, count in self._demand.items()}
        bundles = [dict(bundle) for _ in range(job.num_nodes)]
        here = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
        self._group = placement_group(
            bundles,
            strategy="STRICT_SPREAD",
            bundle_label_selector=[here, *({} for _ in bundles[1:])],
        )
        if not self._group.wait(PLACEMENT_SECONDS):
            remove_placement_group(self._group)
            raise TimeoutError(
                f"the Ray cluster did not provide {bundles} on {job.num_nodes} nodes within "
                f"{PLACEMENT_SECONDS:.0f} s; `ray status` shows its resources"
            )
        self._holder: Any = None
        self._workers: dict[int, Any] = {}
        self._is_closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, settings: Settings, on_exit: Callable[[WorkerExit], None]) -> None:
        """Start the actors."""
        if "GPU" in self._demand:
            self._holder = self._actor(Holder, node=0).remote()
            # torch is imported later.
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(ray.get(self._holder.gpu_ids.remote()))
        for node in range(self._job.num_nodes):
            for rank in self._job.ranks_of(node):
                own = {**settings, "rank": rank, "local_rank": 0}
                self._workers[rank] = self._actor(Worker, node).remote(own)
        self._thread = threading.Thread(
            target=self._watch, args=(on_exit,), name="ray-ranks", daemon=True
        )
        self._thread.start()

    def close(self, seconds: float) -> None:
        """End the actors, and release the bundles."""
        if self._is_closing.is_set():
            return
        self._is_closing.set()
        if self._thread is not None:
            self._thread.join()
        ends = [worker.close.remote(seconds) for worker in self._workers.values()]
        with suppress(RayError, GetTimeoutError):
            ray.get(ends, timeout=seconds + 1.0)
        for actor in (*self._workers.values(), self._holder):
            if actor is not None:
                ray.kill(actor)
        remove_placement_group(self._group)
        if self._owns_connection:
            ray.shutdown()

    def _actor(self, kind: type[Any], node: int) -> Any:
        """Return the class of an actor in the bundle of a node."""
        return ray.remote(kind).options(
            num_cpus=self._demand["CPU"] if kind is Worker else 0,
            num_gpus=self._demand.get("GPU", 0),
            max_concurrency=2,  # `close` runs while `wait` waits
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=self._group, placement_group_bundle_index=node
            ),
        )

    def _watch(self, on_exit: Callable[[WorkerExit], None]) -> None:
        """Report each rank that has ended. After the first one, the engine ends all others."""
        ranks = {worker.wait.remote(): rank for rank, worker in self._workers.items()}
        while not self._is_closing.is_set():
            ended, _ = ray.wait(list(ranks), num_returns=1, timeout=TICK_SECONDS)
            for each in ended:
                try:
                    reason, lines = ray.get(each)
                except RayError as error:
                    reason, lines = f"lost its Ray actor: {str(error).splitlines()[0]}", ()
                on_exit(WorkerExit(ranks.pop(each), reason, lines))
            if not ranks:
                return
