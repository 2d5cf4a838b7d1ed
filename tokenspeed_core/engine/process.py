"""The program of an engine process: a socket to each API worker, and the step loop."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import zmq

from tokenspeed_core.config import Config
from tokenspeed_core.engine.engine import Engine
from tokenspeed_core.engine.environment import take_devices, threads_per_rank
from tokenspeed_core.engine.factory import Started, discover_in_subprocess, resolve, start
from tokenspeed_core.engine.kv_event_publisher import KVEventPublisher
from tokenspeed_core.engine.messages import (
    WORKER_SHIFT,
    Abort,
    Drain,
    Failed,
    Heartbeat,
    Outputs,
    Ready,
    Submit,
    WorkerReady,
    to_engine,
)
from tokenspeed_core.engine.parent_death import attach_to_parent
from tokenspeed_core.engine.progress import StartProgress
from tokenspeed_core.engine.transport import Socket, bind, send, send_outputs
from tokenspeed_core.engine.wire import pack
from tokenspeed_core.errors import EngineDeadError, TokenSpeedError
from tokenspeed_core.executor import Ranks
from tokenspeed_core.executor.lockstep import LockstepRunner, Peers
from tokenspeed_core.plugins.hooks import Hooks

HEARTBEAT_SECONDS = 1.0
MAX_MESSAGES = (
    128  # read from an API worker between two steps; a submitted prompt takes about 50 us
)
STUCK_SECONDS = 3.0  # for the main thread to end after a rank failed
log = logging.getLogger("tokenspeed.engine")


class EngineLoop:
    """Receives requests, steps, and sends outputs. When idle, it sleeps on its sockets."""

    def __init__(
        self,
        engine: Engine,
        ready: Ready,
        sockets: Sequence[Socket],
        parent_fd: int,
        publish: Callable[[], None] | None = None,
        ranks: Ranks | None = None,
        lockstep: LockstepRunner | None = None,
    ) -> None:
        """Take one socket per API worker, in their order, and the reading end of the parent's pipe.

        `publish` is called after the outputs of a step were sent, while the next step runs. `ranks` are the engine's
        other processes, if it has any. With `lockstep`, the engine executes its steps together with others.
        """
        self._publish = publish
        self.engine = engine
        self._ready = ready
        self._sockets = sockets
        self._parent_fd = parent_fd
        self._poller = zmq.Poller()
        for each in (parent_fd, *sockets):
            self._poller.register(each, zmq.POLLIN)
        self._ranks = ranks
        if ranks is not None:
            self._poller.register(ranks.failure_fd, zmq.POLLIN)
        self._lockstep = lockstep
        for fd in [] if lockstep is None else lockstep.fds:
            self._poller.register(fd, zmq.POLLIN)
        self._num_starting = len(sockets)  # API workers that cannot serve yet
        self._is_draining = False
        self._heartbeat_at = time.monotonic() - HEARTBEAT_SECONDS
        self._was_working = False

    def run(self) -> None:
        """Serve until drained or until the parent exits. Raises EngineDeadError, or PluginError if a policy fails."""
        engine = self.engine
        step = engine.step if self._lockstep is None else self._step_together
        while True:
            readable = [each for each, _ in self._poller.poll(self._sleep_ms())]
            if self._parent_fd in readable:
                return
            if self._ranks is not None and self._ranks.failure is not None:
                raise EngineDeadError(self._ranks.failure)
            for socket in self._sockets:
                if socket in readable:
                    self._receive(socket)
            for outputs in step():
                send_outputs(self._sockets, outputs)
            for rejected in engine.take_rejected():
                send(self._sockets[rejected.request_id >> WORKER_SHIFT], rejected)
            if self._publish is not None:
                self._publish()
            self._send_heartbeat()
            if self._is_draining and not engine.has_work and self._may_end():
                return

    def _step_together(self) -> list[Outputs]:
        """Execute a step. Without work, take part in another engine's step, if there is one."""
        assert self._lockstep is not None
        num_before = self._lockstep.num_steps
        outputs = self.engine.step()
        if self._lockstep.num_steps == num_before:
            self._lockstep.join()
        return outputs

    def _may_end(self) -> bool:
        """Return whether no other engine needs this one, which has no requests and gets none."""
        return self._lockstep is None or self._lockstep.finish()

    def _sleep_ms(self) -> int:
        if self.engine.has_work:
            return 0
        return max(0, int((self._heartbeat_at + HEARTBEAT_SECONDS - time.monotonic()) * 1e3) + 1)

    def _receive(self, socket: Socket) -> None:
        for _ in range(MAX_MESSAGES):
            try:
                message = to_engine.unpack(socket.recv(zmq.DONTWAIT))
            except zmq.Again:
                return
            match message:
                case Submit():
                    rejected = self.engine.submit(message)
                    if rejected is not None:
                        send(socket, rejected)
                case Abort():
                    self.engine.abort(message.sequence_ids.tolist())
                case Drain():
                    self._is_draining = True
                case WorkerReady():
                    self._num_starting -= 1
                    if not self._num_starting:
                        self._send_all(self._ready)

    def _send_all(self, message: Ready | Heartbeat) -> None:
        for socket in self._sockets:
            send(socket, message)

    def _send_heartbeat(self) -> None:
        """Send a heartbeat if one is due or if work began or ended."""
        now, is_working = time.monotonic(), self.engine.has_work
        is_due = now - self._heartbeat_at >= HEARTBEAT_SECONDS
        if not is_due and is_working == self._was_working:
            return
        self._heartbeat_at = now
        self._was_working = is_working
        scheduler = self.engine.scheduler
        self._send_all(
            Heartbeat(
                self.engine.num_steps,
                scheduler.sequences.num_running,
                self.engine.num_waiting,
                self._is_draining,
                self.engine.stats(),
            )
        )


def main() -> int:
    """Run an engine process: `process.py PIPE`. Return the exit status."""
    settings, parent_fd = attach_to_parent(sys.argv[1:])
    # A service manager signals every process of a unit. The parent drains this one, or closes the pipe.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    sockets = [bind(address) for address in settings["addresses"]]
    try:
        _serve(settings, sockets, parent_fd)
    except TokenSpeedError as error:
        sockets[0].send(pack(Failed(str(error))))
        return 1
    finally:
        for socket in sockets:
            socket.close(linger=2000)
    return 0


def _serve(settings: dict[str, Any], sockets: Sequence[Socket], parent_fd: int) -> None:
    # The launcher has logged the same warnings already.
    logging.getLogger("tokenspeed.plugins.metadata").disabled = True
    replica = settings["replica"]
    config, catalog = discover_in_subprocess(
        Config, settings, f"engine-{replica}" if replica else "engine"
    )
    hooks = Hooks.load(catalog)
    if config.data_parallel_size > 1:
        take_devices(config, replica)

    def exit_if_stuck(reason: str) -> None:
        """End this process soon, since its main thread may wait forever for a rank that failed."""
        timer = threading.Timer(STUCK_SECONDS, _exit, (reason, sockets[0]))
        timer.daemon = True
        timer.start()

    if replica:
        logging.disable(logging.INFO)  # the first replica logs the start
    has_bar = config.log_format == "text" and not replica
    with StartProgress(has_bar=None if has_bar else False) as progress:
        num_threads = threads_per_rank(config, num_reserved=len(sockets))
        resolved = resolve(config, catalog, num_threads=num_threads, replica=replica)
        # The parent deletes this folder, also if it kills this process.
        folder = Path(settings["addresses"][0].removeprefix("ipc://")).parent
        peers = Peers(settings["peers"], folder) if settings["peers"] else None
        started = start(
            resolved,
            catalog,
            hooks,
            progress.report,
            on_failure=exit_if_stuck,
            peers=peers,
            folder=folder,
        )
    logging.disable(logging.NOTSET)
    # Garbage collections skip the objects that exist now.
    gc.collect()
    gc.freeze()
    try:
        _run_engine(config, started, sockets, parent_fd, replica)
    finally:
        started.engine.close()


def _run_engine(
    config: Config,
    started: Started,
    sockets: Sequence[Socket],
    parent_fd: int,
    replica: int,
) -> None:
    """Serve, and publish KV events if they are on. Raises the errors of `EngineLoop.run`, and CapacityError."""
    events, publisher = config.kv_events_config, None
    if events is not None and events.enable_kv_cache_events:
        event_log = started.engine.scheduler.kv.collect_events()
        publisher = KVEventPublisher(events, event_log, replica)
    try:
        EngineLoop(
            started.engine,
            started.ready,
            sockets,
            parent_fd,
            None if publisher is None else publisher.publish,
            ranks=started.ranks,
            lockstep=started.lockstep,
        ).run()
    finally:
        if publisher is not None:
            publisher.close()


def _exit(reason: str, socket: Socket) -> None:
    """End the process in the middle of a step."""
    log.error("%s", reason)
    # The main thread does not use the socket while it waits, and the process ends in any case.
    send(socket, Failed(reason))
    socket.close(linger=1000)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
