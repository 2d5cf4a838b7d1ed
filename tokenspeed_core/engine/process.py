"""The engine as a process: one socket to the API process, the step loop, and an end when its parent ends."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import msgpack
import zmq

from tokenspeed_core.config import Config
from tokenspeed_core.engine.engine import Engine
from tokenspeed_core.engine.launch import discover, resolve, start
from tokenspeed_core.engine.orphan import end_with_parent
from tokenspeed_core.engine.progress import StartProgress
from tokenspeed_core.errors import TokenSpeedError
from tokenspeed_core.messages import Abort, Drain, Failed, Pulse, Submit, to_engine
from tokenspeed_core.wire import pack

PULSE_SECONDS = 1.0
log = logging.getLogger("tokenspeed.engine")


class EngineLoop:
    """Receive, step, send; idle it sleeps on the socket. Returns when drained or when the parent is gone."""

    def __init__(self, engine: Engine, socket: zmq.Socket[bytes], parent_fd: int) -> None:
        """Take over a connected socket and the reading end of the parent's pipe."""
        self.engine, self._socket, self._parent_fd = engine, socket, parent_fd
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(parent_fd, zmq.POLLIN)
        self._is_draining = False
        self._pulse_at = 0.0
        self._was_working = False

    def run(self) -> None:
        """Serve until drained or orphaned. Raises EngineDeadError."""
        engine = self.engine
        while True:
            ready = dict(self._poller.poll(self._sleep_ms()))
            if self._parent_fd in ready:
                return
            if self._socket in ready:
                self._receive()
            for outputs in engine.step():
                if len(outputs.sequence_ids):
                    self._socket.send(pack(outputs))
            self._pulse()
            if self._is_draining and not engine.has_work:
                return

    def _sleep_ms(self) -> int:
        if self.engine.has_work:
            return 0
        return max(0, int((self._pulse_at + PULSE_SECONDS - time.monotonic()) * 1e3) + 1)

    def _receive(self) -> None:
        while True:
            try:
                message = to_engine.unpack(self._socket.recv(zmq.DONTWAIT))
            except zmq.Again:
                return
            match message:
                case Submit():
                    self._submit(message)
                case Abort():
                    self.engine.abort(message.sequence_ids.tolist())
                case Drain():
                    self._is_draining = True

    def _submit(self, request: Submit) -> None:
        refused = self.engine.submit(request)
        if refused is not None:
            self._socket.send(pack(refused))

    def _pulse(self) -> None:
        """Say each second, and when work begins or ends, that the loop turns."""
        now, works = time.monotonic(), self.engine.has_work
        if now - self._pulse_at < PULSE_SECONDS and works == self._was_working:
            return
        self._pulse_at, self._was_working = now, works
        scheduler = self.engine.scheduler
        counts = scheduler.kv.counts()
        self._socket.send(pack(Pulse(
            self.engine.num_steps, scheduler.num_running, scheduler.num_waiting,
            counts.total, counts.free, counts.cached, self._is_draining,
        )))


def main(arguments: list[str] | None = None) -> int:
    """Run an engine process: `process.py CONFIG_FILE --parent-fd N`. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="tokenspeed-engine")
    parser.add_argument("config")
    parser.add_argument("--parent-fd", type=int, required=True)
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the API process, which drains this one
    end_with_parent(signal.SIGKILL)  # also where it cannot look at the pipe: loading, or stuck
    data = msgpack.unpackb(Path(options.config).read_bytes())
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
    socket.set_hwm(0)
    socket.connect(f"ipc://{data['socket']}")
    try:
        _serve(data, socket, options.parent_fd)
    except TokenSpeedError as error:
        socket.send(pack(Failed(str(error))))
        socket.close(linger=2000)
        return 1
    socket.close(linger=2000)
    return 0


def _serve(data: dict[str, Any], socket: zmq.Socket[bytes], parent_fd: int) -> None:
    config = Config.from_wire(data["config"])
    logging.basicConfig(level=config.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    catalog = discover(config)
    catalog.verify(data["catalog_digest"])
    with StartProgress() as progress:
        started = start(resolve(config, catalog, num_threads=_num_threads()), catalog, progress.report)
    gc.collect()
    gc.freeze()  # what was made so far stays: no collection need look at it again
    socket.send(pack(started.ready))
    try:
        EngineLoop(started.engine, socket, parent_fd).run()
    finally:
        started.engine.close()


def _num_threads() -> int:
    """Return the threads for a model on the CPU, one core being left to the API process."""
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # a list has a number per level
    return int(asked) if asked.isdecimal() and int(asked) else max(1, len(os.sched_getaffinity(0)) - 1)


if __name__ == "__main__":
    sys.exit(main())
