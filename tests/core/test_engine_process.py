"""The loop of the engine process on the fake model, over a socket as from an API worker."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import zmq
from engine_world import MODEL, World
from tokenspeed_testing.requests import request

from tokenspeed_core.api.sampling import FinishReason
from tokenspeed_core.engine import process
from tokenspeed_core.engine.messages import (
    Abort,
    Drain,
    Heartbeat,
    Outputs,
    Ready,
    Rejected,
    to_api,
)
from tokenspeed_core.engine.process import EngineLoop
from tokenspeed_core.engine.wire import pack
from tokenspeed_core.errors import TokenSpeedError

READY = Ready(100, 1000, 50, "{}")
PATIENCE = 60.0  # seconds to wait for an event; a loaded machine may need many


@dataclass
class Served:
    """A loop in a thread, the API worker's end of its socket, and all messages from it."""

    world: World
    socket: zmq.Socket[bytes]
    parent: int
    received: list[Any] = field(default_factory=list)
    raised: list[BaseException] = field(default_factory=list)
    num_steps: int = 0
    resume: threading.Event = field(default_factory=threading.Event)

    def send(self, message: Any) -> None:
        self.socket.send(pack(message))

    def wait(self, until: Callable[[], object]) -> None:
        """Receive messages until a condition holds."""
        deadline = time.monotonic() + PATIENCE
        while not until():
            assert time.monotonic() < deadline, f"waited in vain; came: {self.received[-5:]}"
            if self.socket.poll(20):
                self.received.append(to_api.unpack(self.socket.recv()))

    def of(self, kind: type[Any]) -> list[Any]:
        return [message for message in self.received if isinstance(message, kind)]

    def tokens(self, sequence_id: int) -> list[int]:
        found: list[int] = []
        for out in self.of(Outputs):
            ends = np.cumsum(out.num_tokens)
            for i in np.flatnonzero(out.sequence_ids == sequence_id):
                found += out.token_ids[ends[i] - out.num_tokens[i] : ends[i]].tolist()
        return found

    def finish(self, sequence_id: int) -> FinishReason:
        for out in self.of(Outputs):
            for i in np.flatnonzero(out.sequence_ids == sequence_id):
                if out.finish[i]:
                    return FinishReason(int(out.finish[i]))
        return FinishReason.NOT


class Serving:
    """Starts loops, and ends those that a test leaves running."""

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.running: list[tuple[Served, threading.Thread, int]] = []

    def __call__(self, *, pauses_at: int = 0, **changes: Any) -> Served:
        """Start a loop. Its step number `pauses_at` waits until `resume` is set."""
        world = World(**changes)
        theirs, ours = self.context.socket(zmq.PAIR), self.context.socket(zmq.PAIR)
        address = f"inproc://engine-{len(self.running)}"
        ours.bind(address)
        theirs.connect(address)
        reading, writing = os.pipe()
        served = Served(world, ours, writing)
        step = world.engine.step

        def counted() -> list[Outputs]:
            served.num_steps += 1
            if served.num_steps == pauses_at:
                served.resume.wait()
            return step()

        world.engine.step = counted  # type: ignore[method-assign]
        loop = EngineLoop(world.engine, READY, [theirs], reading)

        def run() -> None:
            try:
                loop.run()
            except TokenSpeedError as error:
                served.raised.append(error)
            finally:
                theirs.close(linger=1000)

        thread = threading.Thread(target=run)
        thread.start()
        self.running.append((served, thread, reading))
        return served

    def has_returned(self, served: Served) -> bool:
        (thread,) = [thread for each, thread, _ in self.running if each is served]
        thread.join(PATIENCE)
        return not thread.is_alive()

    def orphan(self, served: Served) -> None:
        """Close the parent's end of the pipe, as when it dies."""
        if served.parent >= 0:
            os.close(served.parent)
            served.parent = -1

    def close(self) -> None:
        for served, thread, reading in self.running:
            self.orphan(served)
            served.resume.set()
            thread.join(PATIENCE)
            assert not thread.is_alive(), "the loop outlives its parent"
            os.close(reading)
            served.socket.close(linger=0)
        self.context.term()


@pytest.fixture
def serve() -> Iterator[Serving]:
    serving = Serving()
    yield serving
    serving.close()


ENDLESS = 4000  # tokens: more than come before step PAUSE
PAUSE = 100
LONG = {"max_model_len": ENDLESS + 10, "num_pages": 1100}


def test_request_returns_tokens_and_a_finish_reason(serve: Serving) -> None:
    served = serve()
    served.send(request(0, [1, 2, 3], n=2, max_tokens=9))
    served.wait(lambda: served.finish(0) and served.finish(1))
    for sequence_id in (0, 1):
        assert served.tokens(sequence_id) == MODEL.expected([1, 2, 3], 9)
        assert served.finish(sequence_id) is FinishReason.LENGTH


def test_rejected_request_does_not_affect_others(serve: Serving) -> None:
    served = serve()
    served.send(request(0, [1, 2, 3]))
    served.send(request(1, []))
    served.send(request(2, [1] * 40, max_tokens=400))
    served.wait(lambda: served.finish(0) and len(served.of(Rejected)) == 2)
    assert [(each.request_id, each.reason) for each in served.of(Rejected)] == [
        (1, "too_long"),
        (2, "too_long"),
    ]
    assert served.tokens(0) == MODEL.expected([1, 2, 3], 8)


def test_aborted_sequence_sends_nothing_more(serve: Serving) -> None:
    served = serve(**LONG, pauses_at=PAUSE)
    served.send(request(0, [1, 2, 3], max_tokens=ENDLESS))
    served.send(request(1, [3, 2, 1], max_tokens=200))
    served.wait(lambda: served.tokens(0) and served.tokens(1))
    served.send(Abort(np.asarray([0, 77], np.int64)))
    served.resume.set()
    served.wait(lambda: served.finish(1))
    served.wait(lambda: served.of(Heartbeat)[-1].num_running == 0)
    assert served.finish(0) is FinishReason.NOT
    assert len(served.tokens(0)) < ENDLESS
    assert served.tokens(1) == MODEL.expected([3, 2, 1], 200)
    assert served.world.scheduler.sequences.get(0) is None


def test_draining_engine_finishes_its_work(serve: Serving) -> None:
    served = serve(max_num_seqs=1)
    for sequence_id in range(3):
        served.send(request(sequence_id, [1, 2, sequence_id], max_tokens=20))
    served.send(Drain())
    served.wait(lambda: all(served.finish(i) for i in range(3)))
    assert [served.tokens(i) for i in range(3)] == [MODEL.expected([1, 2, i], 20) for i in range(3)]
    assert serve.has_returned(served)
    served.wait(lambda: served.of(Heartbeat) and served.of(Heartbeat)[-1].is_draining)


def test_idle_engine_drains_at_once(serve: Serving) -> None:
    served = serve()
    served.wait(lambda: served.of(Heartbeat))
    served.send(Drain())
    assert serve.has_returned(served)


@pytest.mark.parametrize("works", [False, True])
def test_engine_ends_with_its_parent(
    serve: Serving,
    works: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process, "HEARTBEAT_SECONDS", 3600.0)
    served = serve(**LONG, pauses_at=PAUSE)
    if works:
        served.send(request(0, [1, 2, 3], max_tokens=ENDLESS))
        served.wait(lambda: served.tokens(0))
    else:
        served.wait(lambda: served.of(Heartbeat))
    serve.orphan(served)
    served.resume.set()
    assert serve.has_returned(served)
    assert served.world.engine.has_work is works


def test_idle_engine_sleeps_between_heartbeats(
    serve: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "HEARTBEAT_SECONDS", 0.1)
    start = time.monotonic()
    served = serve()
    served.wait(lambda: len(served.of(Heartbeat)) >= 4)
    num_periods = (time.monotonic() - start) / process.HEARTBEAT_SECONDS
    assert served.num_steps <= 3 * (num_periods + 1)
    assert {each.num_running for each in served.of(Heartbeat)} == {0}


def test_heartbeat_follows_begin_and_end_of_work(
    serve: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "HEARTBEAT_SECONDS", 3600.0)
    served = serve(max_num_seqs=2)
    served.wait(lambda: len(served.of(Heartbeat)) == 1)
    served.send(request(0, [1, 2, 3], n=3, max_tokens=30))
    served.wait(lambda: len(served.of(Heartbeat)) == 3)
    first, begins, ends = served.of(Heartbeat)
    assert (first.num_steps, first.num_running, first.num_waiting) == (0, 0, 0)
    assert begins.num_running >= 1
    assert (ends.num_running, ends.num_waiting) == (0, 0)
    assert ends.num_steps == served.world.engine.num_steps > 30
    assert not ends.is_draining


def test_working_engine_sends_heartbeats(serve: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "HEARTBEAT_SECONDS", 0.02)
    served = serve(**LONG)
    served.send(request(0, [1, 2, 3], max_tokens=400))
    served.wait(lambda: served.finish(0))
    steps = [each.num_steps for each in served.of(Heartbeat) if each.num_running]
    assert len(steps) >= 3
    assert steps == sorted(set(steps)), "every heartbeat of a working engine reports new steps"


def test_loop_continues_after_a_failed_step(serve: Serving) -> None:
    served = serve(fail_at=frozenset({2}))
    served.send(request(0, [1, 2, 3]))
    served.wait(lambda: served.finish(0))
    assert served.finish(0) is FinishReason.ERROR
    served.send(request(1, [1, 2, 3]))
    served.wait(lambda: served.finish(1))
    assert served.tokens(1) == MODEL.expected([1, 2, 3], 8)


def test_loop_raises_when_the_device_is_dead(serve: Serving) -> None:
    served = serve(fail_at=frozenset(range(1, 100)))
    for sequence_id in range(3):
        served.send(request(sequence_id, [1, 2, 3], max_tokens=1))
        if sequence_id < 2:
            served.wait(lambda: served.finish(sequence_id))  # noqa: B023
    assert serve.has_returned(served)
    assert [str(error) for error in served.raised] == [
        "3 steps in a row failed; the last: step 3 was made to fail"
    ]


def test_unreadable_message_ends_the_loop(
    serve: Serving,
) -> None:
    served = serve()
    served.socket.send(b"nonsense")
    assert serve.has_returned(served)
    (error,) = served.raised
    assert "\n" not in str(error)
