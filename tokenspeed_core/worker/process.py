"""A rank other than 0: a process that executes the plans of rank 0."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import zmq

from tokenspeed_core.api.step import StepFailed
from tokenspeed_core.config import Config
from tokenspeed_core.engine.environment import prepare_torch
from tokenspeed_core.engine.factory import discover_in_subprocess, resolve
from tokenspeed_core.engine.parent_death import attach_to_parent
from tokenspeed_core.engine.wire import pack
from tokenspeed_core.errors import TokenSpeedError
from tokenspeed_core.executor.lockstep import SharingRunner
from tokenspeed_core.executor.messages import (
    Agreed,
    ChooseStep,
    Close,
    Forward,
    Joined,
    Offer,
    RankFailed,
    Rendezvous,
    Sample,
    to_worker,
)
from tokenspeed_core.executor.model_files import digest_models

DEPTH = 2  # steps in flight on rank 0, at most
Socket = zmq.Socket[bytes]


class ParentDiedError(Exception):
    """The process that started this one has ended, so this one must end too."""


class RankZero:
    """The sockets to rank 0."""

    def __init__(self, settings: Mapping[str, Any], parent_fd: int) -> None:
        """Connect. The subscription tells rank 0 that this rank listens."""
        self.rank = int(settings["rank"])
        self._context: zmq.Context[Socket] = zmq.Context()
        self._plans: Socket = self._context.socket(zmq.SUB)
        self._reports: Socket = self._context.socket(zmq.PUSH)
        for socket in (self._plans, self._reports):
            socket.set_hwm(0)
        self._plans.connect(settings["plans"])
        self._reports.connect(settings["reports"])
        self._plans.subscribe(b"")
        self._parent_fd = parent_fd
        self._poller = zmq.Poller()
        self._poller.register(self._plans, zmq.POLLIN)
        self._poller.register(parent_fd, zmq.POLLIN)

    def receive(self) -> Any:
        """Wait for a message. Raises ParentDiedError."""
        if self._parent_fd in [each for each, _ in self._poller.poll()]:
            raise ParentDiedError
        return to_worker.unpack(self._plans.recv())

    def report(self, message: Joined | Offer | RankFailed) -> None:
        """Send a message."""
        self._reports.send(pack(message))

    def agree(self, value: int) -> int:
        """Offer a value; return the smallest of all ranks."""
        self.report(Offer(self.rank, value))
        message = self.receive()
        assert isinstance(message, Agreed), message
        return message.value

    def close(self) -> None:
        """Send the remaining reports, for at most 2 seconds, and close."""
        self._plans.close(linger=0)
        self._reports.close(linger=2000)
        self._context.term()  # waits for the reports, which the end of the process would drop


def main() -> int:
    """Run a rank: `process.py PIPE`. Return the exit status."""
    settings, parent_fd = attach_to_parent(sys.argv[1:])
    # A service manager signals every process of a unit. Rank 0 ends this one.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    rank_zero = RankZero(settings, parent_fd)
    try:
        _run(settings, rank_zero)
    except ParentDiedError:
        return 0
    except TokenSpeedError as error:
        if isinstance(error, StepFailed):
            # When a rank dies, the collectives of the other ranks fail too. The rank that died is reported first.
            time.sleep(settings["attribution_seconds"])
        rank_zero.report(RankFailed(rank_zero.rank, str(error)))
        return 1
    finally:
        rank_zero.close()
    return 0


def _run(settings: Mapping[str, Any], rank_zero: RankZero) -> None:
    replica, name = settings["replica"], f"rank-{rank_zero.rank}"
    config, catalog = discover_in_subprocess(
        Config, settings, f"engine-{replica}-{name}" if replica else name
    )
    for name in ("plugins.metadata", "worker", "engine", "models"):
        logging.getLogger(f"tokenspeed.{name}").setLevel(logging.ERROR)  # rank 0 logs the same
    prepare_torch()
    from tokenspeed_core.worker import distributed
    from tokenspeed_core.worker.local import build
    from tokenspeed_core.worker.platform import resolve_rank_device

    device = resolve_rank_device(config.device, settings["local_rank"])
    resolved = resolve(
        config.resolved(device=str(device)),
        catalog,
        num_threads=settings["num_threads"],
        rank=rank_zero.rank,
        replica=replica,
    )
    resolved = replace(resolved, grammars=None)  # rank 0 sends the masks
    rank_zero.report(Joined(rank_zero.rank, digest_models(resolved, catalog)))
    message = rank_zero.receive()
    assert isinstance(message, Rendezvous), message
    handles = distributed.init(resolved.parallel, message.address, device)
    runner = build(
        resolved, catalog, lambda stage, done, total: None, handles=handles, agree=rank_zero.agree
    )
    try:
        follow(runner, rank_zero)
    finally:
        runner.close()
        distributed.close()


def follow(runner: SharingRunner, rank_zero: RankZero) -> None:
    """Execute plans until rank 0 closes. Raises StepFailed, and ParentDiedError."""
    in_flight: deque[int] = deque()
    while True:
        match rank_zero.receive():
            case ChooseStep(sizes):
                runner.choose_shared_step(sizes)
            case Forward(plan):
                in_flight.append(plan.step_id)
                runner.forward(plan)
            case Sample(step_id, late):
                runner.sample(step_id, late)
                # Rank 0 waits for this step too before it sends the next plan.
                if len(in_flight) == DEPTH:
                    runner.collect(in_flight.popleft())
            case Close():
                return


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Nothing is left to free, and libraries' own clean-up may wait for ranks that have ended.
    os._exit(status)
