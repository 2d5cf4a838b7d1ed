"""Engines that share experts: each plans its own steps, and all of them execute a step at the same time.

Before each step the engines exchange the sizes of their steps, because the collectives depend on them. If a captured
step fits all of these sizes, all engines replay it. Otherwise all engines execute eagerly. An engine without work
executes a step of padding whenever another one waits for it, and sleeps otherwise.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Protocol

import numpy as np

from tokenspeed_core.api.step import (
    BlockDelta,
    LateInputs,
    Runner,
    StepFailed,
    StepPlan,
    StepResult,
    StepSize,
)
from tokenspeed_core.errors import EngineDeadError

FINISH_SECONDS = 1.0  # between the end of a connection and that of this engine
ATTRIBUTION_SECONDS = 1.0  # between the failure of a collective and the notice that an engine ended
_MAX_BYTES = 4096  # of a message
_POLL_MILLISECONDS = 100
_SIZE = struct.Struct("<4i2?")
_FINISHED = b"\0"  # instead of a size: this engine has no requests, and gets no others
# Prefixes of longer messages; no size is as long.
_FAILED = b"\1" + bytes(_SIZE.size)  # before the reason why this engine ends
_TEXT = b"\2" + bytes(_SIZE.size)  # before a text of `share`
_NO_REQUESTS = StepSize()
_EMPTY_STEP_IDS = (-1, -2)  # used in turn by steps without a request


class Peers:
    """The connections to the other engines of a group."""

    def __init__(self, fds: Sequence[int], folder: Path | None = None) -> None:
        """Take a connected socket to each engine (see `connect_peers`), and -1 for this engine itself.

        Files by which all processes meet are made within `folder`.
        """
        self.folder = folder
        self._reason: str | None = None  # why the engines cannot continue
        self._lost_rank: int | None = None  # the first other engine that ended
        self._has_failed = threading.Event()
        self.rank, self.num_engines = fds.index(-1), len(fds)
        self._sockets = {
            rank: socket.socket(fileno=fd) for rank, fd in enumerate(fds) if rank != self.rank
        }
        self._sizes: dict[int, deque[StepSize]] = {rank: deque() for rank in self._sockets}
        self._texts: deque[str] = deque()
        self._finished: set[int] = set()
        self._has_finished = False
        self._is_closed = False
        # `watch` reads messages too. No thread waits for a message while it holds the lock.
        self._lock = threading.RLock()
        self._readable = {rank: select.poll() for rank in self._sockets}
        for rank, poller in self._readable.items():
            poller.register(self._sockets[rank], select.POLLIN)

    @property
    def fds(self) -> list[int]:
        """The descriptors that are readable when another engine waits for this one, or has ended."""
        return [each.fileno() for each in self._sockets.values()]

    @property
    def failure(self) -> str | None:
        """Why the engines cannot continue: the first engine or rank that ended. None: they can."""
        if self._reason is None and self._lost_rank is not None:
            return self._name(self._lost_rank, "ended")
        return self._reason

    @property
    def have_finished(self) -> bool:
        """Whether no engine, including this one, has or accepts requests."""
        return self._has_finished and len(self._finished) == len(self._sockets)

    def share(self, make: Callable[[], str]) -> str:
        """Return the text that the first engine makes, at the start. Raises StepFailed if an engine ended."""
        if self.rank == 0:
            text = make()
            for rank in self._sockets:
                self._send(rank, _TEXT + text.encode())
            return text
        while not self._texts:
            if not self._receive(0, wait=True):
                raise self._lost(0)
        return self._texts.popleft()

    def exchange(self, size: StepSize) -> Sequence[StepSize]:
        """Send the size of the next step and return those of all engines. Waits for them. Raises StepFailed."""
        sizes, message = [size] * self.num_engines, _pack(size)
        for rank in self._sockets:
            self._send(rank, message)
        for rank, received in self._sizes.items():
            while not received:
                if not self._receive(rank, wait=True):
                    raise self._lost(rank)
            sizes[rank] = received.popleft()
        return sizes

    def is_waiting(self) -> bool:
        """Return whether another engine has begun the next step. Raises StepFailed if one has ended."""
        for rank in self._sockets:
            while self._receive(rank):
                pass
        return any(self._sizes.values())

    def finish(self) -> None:
        """Tell the others, once, that this engine begins no further step. Raises StepFailed if one has ended."""
        if not self._has_finished:
            self._has_finished = True
            for rank in self._sockets:
                self._send(rank, _FINISHED)

    def watch(self, on_lost: Callable[[str], None]) -> None:
        """Call a function from another thread when another engine has ended before all have finished.

        It gets the reason that an engine sent, even if the engine's own thread reads no messages.
        """
        poller = select.poll()
        ranks = {each.fileno(): rank for rank, each in self._sockets.items()}
        for fd in ranks:
            poller.register(fd, select.POLLRDHUP)

        def wait() -> None:
            fd, _ = poller.poll()[0]
            self._read_all()
            self._lost_rank = ranks[fd]
            self._has_failed.set()
            time.sleep(FINISH_SECONDS)  # for messages that are not sent yet
            self._read_all()
            if not self._is_closed and not self.have_finished:
                assert self.failure is not None, "an engine ended"
                on_lost(self.failure)

        threading.Thread(target=wait, name="peers", daemon=True).start()

    def fail(self, reason: str) -> None:
        """Leave the other engines, because this one cannot continue. Can be called from any thread."""
        with self._lock:
            if self._reason is None:
                self._reason = reason
        self._has_failed.set()
        first_line = reason.partition("\n")[0].encode()[: _MAX_BYTES - len(_FAILED)]
        for each in self._sockets.values():
            with suppress(OSError):  # closed already
                each.send(_FAILED + first_line, socket.MSG_DONTWAIT)
        self._shut_down()

    def wait_for_failure(self, seconds: float) -> str | None:
        """Wait until an engine ended or failed. Return why the engines cannot continue, or None."""
        if self._has_failed.wait(seconds):
            with suppress(StepFailed):
                self.is_waiting()  # reads the reason, if the engine sent one
        return self.failure

    def close(self) -> None:
        """Close the connections. Can be called twice."""
        with self._lock:
            self._is_closed = True
            self._shut_down()
            for each in self._sockets.values():
                each.close()

    def _shut_down(self) -> None:
        for each in self._sockets.values():
            with suppress(OSError):  # closed already
                each.shutdown(socket.SHUT_RDWR)  # wakes this engine and the others

    def _lost(self, rank: int, message: bytes = b"") -> StepFailed:
        """Record that another engine ended, with the reason in its last message. Return the error for the first cause."""
        with self._lock:
            if self._reason is None:
                if not message:  # perhaps it lost another engine, which sent its reason
                    found = {other: self._failure_of(other) for other in self._sockets}
                    rank, message = next((each for each in found.items() if each[1]), (rank, b""))
                reason = message[len(_FAILED) :].decode(errors="replace")
                self._reason = self._name(rank, f"failed: {reason}" if reason else "ended")
            return StepFailed(self._reason)

    def _name(self, rank: int, how: str) -> str:
        return f"engine {rank} of {self.num_engines}, which holds a part of the experts, {how}"

    def _send(self, rank: int, data: bytes) -> None:
        try:
            self._sockets[rank].send(data)
        except OSError as error:
            while self._receive(rank):
                pass  # until the reason, if the engine sent one
            raise self._lost(rank) from error

    def _read_all(self) -> None:
        """Read the messages that have arrived, and record the reason if an engine sent one."""
        for rank in self._sockets:
            with self._lock, suppress(StepFailed):
                while not self._is_closed and self._receive(rank):
                    pass

    def _receive(self, rank: int, *, wait: bool = False) -> bool:
        """Read a message of another engine; return whether there was one. Raises StepFailed if it ended too early.

        With `wait`, wait for a message, and also return True if there is none for some time: `watch` may have read it.
        """
        while True:
            with self._lock:
                data = self._read(rank)
                if data is not None:
                    return self._take(rank, data)
            if not wait:
                return False
            if not self._readable[rank].poll(_POLL_MILLISECONDS):
                return True

    def _take(self, rank: int, data: bytes) -> bool:
        """Record a message of another engine; return False for b"", its end. Raises StepFailed if it ended too early."""
        if not data:
            if self._has_finished and rank in self._finished:
                return False
            raise self._lost(rank)
        if data.startswith(_FAILED):
            raise self._lost(rank, data)
        if data.startswith(_TEXT):
            self._texts.append(data[len(_TEXT) :].decode())
        elif data == _FINISHED:
            self._finished.add(rank)
        else:
            self._sizes[rank].append(StepSize(*_SIZE.unpack(data)))
        return True

    def _read(self, rank: int) -> bytes | None:
        """Return a message of another engine, b"" after its last one, or None if there is none yet."""
        for _ in range(2):
            try:
                return self._sockets[rank].recv(_MAX_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
            except ConnectionError:
                continue  # it ended before it read our last message; its own may follow
        return b""

    def _failure_of(self, rank: int) -> bytes:
        """Return the message with which another engine failed, or b""."""
        while data := self._read(rank):
            if data.startswith(_FAILED):
                return data
        return b""


def connect_peers(num_engines: int) -> list[list[int]]:
    """Return the sockets of each engine to all engines, which child processes inherit; -1 is an engine itself."""
    fds = [[-1] * num_engines for _ in range(num_engines)]
    for first, second in combinations(range(num_engines), 2):
        pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fds[first][second], fds[second][first] = (each.detach() for each in pair)
    return fds


def _pack(size: StepSize) -> bytes:
    return _SIZE.pack(
        size.num_decodes,
        size.num_draft_tokens,
        size.num_chunks,
        size.num_chunk_tokens,
        size.is_eager,
        size.no_shared_prefix,
    )


class SharingRunner(Runner, Protocol):
    """A runner with collectives that depend on the sizes of the steps of all engines."""

    def step_size(self, plan: StepPlan) -> StepSize:
        """Return the size of this engine's next step."""

    def choose_shared_step(self, sizes: Sequence[StepSize]) -> bool:
        """Choose how all engines execute the next step. Return whether it is captured and needs no padding row."""


@dataclass(frozen=True, slots=True)
class EmptyStep:
    """The plans of a step of padding: one to replay a captured step, one to execute eagerly."""

    captured: StepPlan
    eager: StepPlan


class LockstepRunner:
    """A `Runner` that executes every step together with the other engines.

    After a failure the engines cannot continue, because they no longer execute the same steps. The message names the
    engine or the rank that ended first.
    """

    def __init__(
        self,
        runner: SharingRunner,
        peers: Peers,
        *,
        unused_slot: int,
        num_groups: int,
        leave: Callable[[], None] | None,
    ) -> None:
        """Take the runner of this engine's processes. `unused_slot` is the slot of padding.

        `leave` ends the communication; None: the runner does so.
        """
        self.num_steps = 0
        self.fds = peers.fds
        self._runner, self._peers, self._leave = runner, peers, leave
        self._empty = [
            EmptyStep(
                empty_plan(step_id, [], num_groups), empty_plan(step_id, [unused_slot], num_groups)
            )
            for step_id in _EMPTY_STEP_IDS
        ]
        self._joined: int | None = None  # the step without a request that is in flight

    def forward(self, plan: StepPlan) -> None:
        """Launch the forward of a step on all engines. Raises StepFailed."""
        try:
            if plan.num_rows:
                self.num_steps += 1
                sizes = self._peers.exchange(self._runner.step_size(plan))
                self._runner.choose_shared_step(sizes)
            self._runner.forward(plan)
            self._collect_joined()
        except StepFailed as error:
            cause = self._cause_of(error)
            raise cause from cause.__cause__

    def sample(self, step_id: int, late: LateInputs | None) -> None:
        """Launch the sampling of the step launched last. Raises StepFailed."""
        try:
            self._runner.sample(step_id, late)
        except StepFailed as error:
            cause = self._cause_of(error)
            raise cause from cause.__cause__

    def collect(self, step_id: int) -> StepResult:
        """Wait for the oldest launched step. Raises StepFailed."""
        try:
            return self._runner.collect(step_id)
        except StepFailed as error:
            cause = self._cause_of(error)
            raise cause from cause.__cause__

    def _cause_of(self, error: StepFailed) -> StepFailed:
        """Return the end of another engine, without the traceback of the collective that waited for it.

        If no other engine ended, return the error itself, and tell the other engines that this one ends.
        """
        reason = self._peers.wait_for_failure(ATTRIBUTION_SECONDS)
        if reason is not None:
            return StepFailed(reason)
        self._peers.fail(str(error))
        return error

    def join(self) -> None:
        """Launch a step without requests if another engine waits for this one. Raises EngineDeadError.

        No step with requests may be in flight. The device executes the step while the others launch the next one.
        """
        try:
            if self._peers.is_waiting():
                self._launch_empty()
        except StepFailed as error:
            raise EngineDeadError(str(self._cause_of(error))) from error

    def _launch_empty(self) -> None:
        empty = self._empty[self.num_steps % len(self._empty)]
        self.num_steps += 1
        is_captured = self._runner.choose_shared_step(self._peers.exchange(_NO_REQUESTS))
        plan = empty.captured if is_captured else empty.eager
        self._runner.forward(plan)
        self._runner.sample(plan.step_id, None)
        self._collect_joined()
        self._joined = plan.step_id

    def _collect_joined(self) -> None:
        if self._joined is not None:
            step_id, self._joined = self._joined, None
            self._runner.collect(step_id)

    def finish(self) -> bool:
        """Tell the other engines that this one has no requests and accepts none. Return whether this is true for all engines.

        Until then, this engine must `join` their steps. Raises EngineDeadError.
        """
        try:
            self._peers.finish()
        except StepFailed as error:
            raise EngineDeadError(str(error)) from error
        return self._peers.have_finished

    def close(self) -> None:
        """Free the device memory and leave the other engines. Can be called twice."""
        self._runner.close()
        if self._leave is not None:
            self._leave()
        self._peers.close()


def empty_plan(step_id: int, slots: Sequence[int], num_groups: int) -> StepPlan:
    """Return a step with a padding token for each of the unused `slots`. It writes to the padding page."""
    none = np.zeros(0, np.int32)
    zeros, ones = np.zeros(len(slots), np.int32), np.ones(len(slots), np.int32)
    return StepPlan(
        step_id=step_id,
        num_decodes=0,
        slots=np.asarray(slots, np.int32),
        num_query_tokens=ones,
        num_computed_tokens=zeros,
        wants_logits=np.zeros(len(slots), np.bool_),
        token_ids=zeros,
        adapter_ids=zeros,
        block_deltas=(BlockDelta(none, none, none),) * num_groups,
        slot_inits=None,
    )
