"""Engines that share experts: each plans its own steps, and all of them execute a step at the same time.

Before each step the engines exchange their numbers of tokens, because the collectives need them. An engine without work
executes a step of one padding token whenever another one waits for it, and sleeps otherwise.
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
from itertools import combinations
from typing import Protocol

import numpy as np

from tokenspeed_core.api.parallel import TokenCounts
from tokenspeed_core.api.step import (
    BlockDelta,
    LateInputs,
    Runner,
    StepFailed,
    StepPlan,
    StepResult,
)
from tokenspeed_core.errors import EngineDeadError

FINISH_SECONDS = 1.0  # between the end of a connection and that of this engine
_MAX_BYTES = 4096  # of a text
_COUNT = struct.Struct("<q")
_FINISHED = -1  # instead of a number of tokens: this engine has no requests, and gets no others
_EMPTY_STEP = -1  # the id of a step without a request


class Peers:
    """The connections to the other engines of a group."""

    def __init__(self, fds: Sequence[int]) -> None:
        """Take a connected socket to each engine (see `connect_peers`), and -1 for this engine itself."""
        self.rank, self.num_engines = fds.index(-1), len(fds)
        self._sockets = {
            rank: socket.socket(fileno=fd) for rank, fd in enumerate(fds) if rank != self.rank
        }
        self._counts: dict[int, deque[int]] = {rank: deque() for rank in self._sockets}
        self._finished: set[int] = set()
        self._has_finished = False
        self._is_closed = False

    @property
    def fds(self) -> list[int]:
        """The descriptors that are readable when another engine waits for this one, or has ended."""
        return [each.fileno() for each in self._sockets.values()]

    @property
    def have_finished(self) -> bool:
        """Whether no engine, including this one, has or accepts requests."""
        return self._has_finished and len(self._finished) == len(self._sockets)

    def share(self, make: Callable[[], str]) -> str:
        """Return the text that the first engine makes, at the start. Raises StepFailed if an engine ended."""
        if self.rank == 0:
            text = make()
            for rank in self._sockets:
                self._send(rank, text.encode())
            return text
        data = self._sockets[0].recv(_MAX_BYTES)
        if not data:
            raise StepFailed(self._lost(0))
        return data.decode()

    def exchange(self, num_tokens: int) -> tuple[int, ...]:
        """Return the numbers of tokens of all engines in the next step. Waits for them. Raises StepFailed."""
        counts = [num_tokens] * self.num_engines
        for rank in self._sockets:
            self._send(rank, _COUNT.pack(num_tokens))
        for rank, received in self._counts.items():
            while not received:
                if not self._receive(rank, 0):
                    raise StepFailed(self._lost(rank))
            counts[rank] = received.popleft()
        return tuple(counts)

    def is_waiting(self) -> bool:
        """Return whether another engine has begun the next step. Raises StepFailed if one has ended."""
        for rank in self._sockets:
            while self._receive(rank, socket.MSG_DONTWAIT):
                pass
        return any(self._counts.values())

    def finish(self) -> None:
        """Tell the others, once, that this engine begins no further step. Raises StepFailed if one has ended."""
        if not self._has_finished:
            self._has_finished = True
            for rank in self._sockets:
                self._send(rank, _COUNT.pack(_FINISHED))

    def watch(self, on_lost: Callable[[str], None]) -> None:
        """Call a function from another thread when another engine has ended before all have finished."""
        poller = select.poll()
        ranks = {each.fileno(): rank for rank, each in self._sockets.items()}
        for fd in ranks:
            poller.register(fd, select.POLLRDHUP)

        def wait() -> None:
            fd, _ = poller.poll()[0]
            time.sleep(FINISH_SECONDS)  # for messages that are not read yet
            if not self._is_closed and not self.have_finished:
                on_lost(self._lost(ranks[fd]))

        threading.Thread(target=wait, name="peers", daemon=True).start()

    def close(self) -> None:
        """Close the connections. Can be called twice."""
        self._is_closed = True
        for each in self._sockets.values():
            with suppress(OSError):  # closed already
                each.shutdown(socket.SHUT_RDWR)  # wakes the thread of `watch`
            each.close()

    def _lost(self, rank: int) -> str:
        return f"engine {rank} of {self.num_engines}, which holds a part of the experts, ended"

    def _send(self, rank: int, data: bytes) -> None:
        try:
            self._sockets[rank].send(data)
        except OSError as error:
            raise StepFailed(self._lost(rank)) from error

    def _receive(self, rank: int, flags: int) -> bool:
        """Read a message of another engine; return whether there was one. Raises StepFailed if it ended too early."""
        try:
            data = self._sockets[rank].recv(_COUNT.size, flags)
        except BlockingIOError:
            return False
        except ConnectionError:
            data = b""
        if not data:
            if self._has_finished and rank in self._finished:
                return False
            raise StepFailed(self._lost(rank))
        (value,) = _COUNT.unpack(data)
        if value == _FINISHED:
            self._finished.add(rank)
        else:
            self._counts[rank].append(value)
        return True


def connect_peers(num_engines: int) -> list[list[int]]:
    """Return the sockets of each engine to all engines, which child processes inherit; -1 is an engine itself."""
    fds = [[-1] * num_engines for _ in range(num_engines)]
    for first, second in combinations(range(num_engines), 2):
        pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fds[first][second], fds[second][first] = (each.detach() for each in pair)
    return fds


class TokenRunner(Runner, Protocol):
    """A runner with collectives that depend on the numbers of tokens of all engines."""

    @property
    def token_counts(self) -> TokenCounts:
        """The numbers of tokens of the next step."""


class LockstepRunner:
    """A `Runner` that executes every step together with the other engines.

    Every failure is final: the engines are no longer in step then.
    """

    def __init__(
        self,
        runner: TokenRunner,
        peers: Peers,
        *,
        unused_slot: int,
        num_groups: int,
        leave: Callable[[], None],
    ) -> None:
        """Take this engine's own runner. `unused_slot` is the slot of padding; `leave` ends the communication."""
        self.num_steps = 0
        self.fds = peers.fds
        self._runner, self._peers, self._leave = runner, peers, leave
        self._empty = empty_plan(unused_slot, num_groups)

    def forward(self, plan: StepPlan) -> None:
        """Launch the forward of a step on all engines. Raises StepFailed."""
        if plan.num_rows:
            self.num_steps += 1
            self._runner.token_counts.begin(self._peers.exchange(plan.num_tokens))
        self._runner.forward(plan)

    def sample(self, step_id: int, late: LateInputs | None) -> None:
        """Launch the sampling of the step launched last. Raises StepFailed."""
        self._runner.sample(step_id, late)

    def collect(self, step_id: int) -> StepResult:
        """Wait for the oldest launched step. Raises StepFailed."""
        return self._runner.collect(step_id)

    def join(self) -> None:
        """Execute a step without requests if another engine waits for this one. Raises EngineDeadError.

        No step of this engine is in flight.
        """
        try:
            if self._peers.is_waiting():
                self.forward(self._empty)
                self.sample(_EMPTY_STEP, None)
                self.collect(_EMPTY_STEP)
        except StepFailed as error:
            raise EngineDeadError(str(error)) from error

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
        self._leave()
        self._peers.close()


def empty_plan(slot: int, num_groups: int) -> StepPlan:
    """Return a step of one padding token: its slot is unused, and its keys and values go to the page for padding."""
    none = np.zeros(0, np.int32)
    zero, one = np.zeros(1, np.int32), np.ones(1, np.int32)
    return StepPlan(
        step_id=_EMPTY_STEP,
        num_decodes=0,
        slots=np.asarray([slot], np.int32),
        num_query_tokens=one,
        num_computed_tokens=zero,
        wants_logits=np.zeros(1, np.bool_),
        token_ids=zero,
        adapter_ids=zero,
        block_deltas=(BlockDelta(none, none, none),) * num_groups,
        slot_inits=None,
    )
