"""The engine client delivers tokens to its sinks and follows the health of the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from tokenspeed_core.api.sampling import FinishReason, SamplingParams
from tokenspeed_core.api.step import StepLogprobs
from tokenspeed_core.engine.client import STALL_SECONDS, EngineClient, State
from tokenspeed_core.engine.inputs import InputProcessor, ModelText
from tokenspeed_core.engine.messages import (
    Abort,
    Failed,
    Heartbeat,
    Outputs,
    Ready,
    Rejected,
    Submit,
    TokenLogprobs,
    to_engine,
)
from tokenspeed_core.engine.wire import pack
from tokenspeed_core.errors import RequestFailedError


@dataclass
class Reader:
    """Collects the tokens of a sequence; may complete it, or fail."""

    ends_at: int = 1000
    breaks: bool = False
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    finish: int = 0
    error: RequestFailedError | None = None

    def take(
        self, token_ids: Any, finish: int, num_cached: int, logprobs: TokenLogprobs | None
    ) -> bool:
        if self.breaks:
            raise ZeroDivisionError
        self.tokens += token_ids
        self.logprobs.append(logprobs)
        self.finish = finish
        return len(self.tokens) >= self.ends_at or bool(finish)

    def fail(self, error: RequestFailedError) -> None:
        self.error = error


class Peer:
    """The engine's end of the socket, driven by the test."""

    def __init__(self, address: str) -> None:
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(address)

    def send(self, *messages: Any) -> None:
        for message in messages:
            self.socket.send(message if isinstance(message, bytes) else pack(message))

    def receive(self) -> Any:
        assert self.socket.poll(2000), "the link sent nothing"
        return to_engine.unpack(self.socket.recv())


def outputs(
    rows: dict[int, list[int]], finish: int = 0, logprob_rows: tuple[int, ...] = (), width: int = 0
) -> Outputs:
    """Return the outputs of a step, with recognizable log-probabilities."""
    reported = [token for row in logprob_rows for token in list(rows.values())[row]]
    return Outputs(
        np.array(list(rows), np.int64),
        np.array([len(t) for t in rows.values()], np.int32),
        np.array([i for tokens in rows.values() for i in tokens], np.int32),
        np.full(len(rows), finish, np.int32),
        np.zeros(len(rows), np.int32),
        StepLogprobs(
            np.array(logprob_rows, np.int32),
            width,
            np.array([-i for i in reported], np.float32),
            np.ones(len(reported), np.int32),
            np.array([i + k for i in reported for k in range(width)], np.int32),
            np.array([-i - k for i in reported for k in range(width)], np.float32),
        )
        if logprob_rows
        else None,
    )


def heartbeat(num_steps: int, num_running: int = 0) -> Heartbeat:
    return Heartbeat(num_steps, num_running, 0, False)


READY = Ready(100, 1000, 50, "{}")


def submit(link: EngineClient, *readers: Reader) -> int:
    params = SamplingParams(n=len(readers))
    inputs = InputProcessor(ModelText(None, None), READY)
    request = inputs.request(link.take_ids(len(readers)), params, np.array([1], np.int32))
    link.submit(request, readers)
    return request.request_id


async def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "nothing came"
        await asyncio.sleep(0.005)


@asynccontextmanager
async def linked(
    folder: Path, clock: Callable[[], float] = time.monotonic
) -> AsyncIterator[tuple[EngineClient, Peer]]:
    address = f"ipc://{folder}/s"
    link = EngineClient(address, clock)
    peer = Peer(address)
    peer.send(READY)
    await link.ready
    try:
        yield link, peer
    finally:
        link.close()
        peer.socket.close()


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await test()

    asyncio.run(main())


def test_each_sink_gets_its_tokens_and_logprobs(tmp_path: Path) -> None:
    async def test() -> None:
        async with linked(tmp_path) as (link, peer):
            readers = [Reader(), Reader(), Reader()]
            first = submit(link, *readers)
            assert isinstance(peer.receive(), Submit)
            rows = {first + 2: [5, 6, 7], 999: [1], first: [8], first + 1: []}
            peer.send(outputs(rows, logprob_rows=(0, 2), width=2))
            await until(lambda: readers[0].tokens)
            assert [reader.tokens for reader in readers] == [[8], [], [5, 6, 7]]
            assert readers[1].logprobs == [None]
            columns = readers[2].logprobs[0]
            top = [[(5, -5), (6, -6)], [(6, -6), (7, -7)], [(7, -7), (8, -8)]]
            assert columns == TokenLogprobs([-5, -6, -7], [1, 1, 1], top)

    run(test)


def test_completed_or_failing_sink_is_aborted(tmp_path: Path) -> None:
    async def test() -> None:
        async with linked(tmp_path) as (link, peer):
            ending, breaking, other = Reader(ends_at=1), Reader(breaks=True), Reader()
            first = submit(link, ending, breaking, other)
            peer.receive()
            peer.send(outputs({first: [1], first + 1: [2], first + 2: [3]}))
            abort = await to_thread(peer)
            assert isinstance(abort, Abort)
            assert abort.sequence_ids.tolist() == [first, first + 1]
            assert breaking.error is not None
            assert other.tokens == [3]
            assert other.error is None

    run(test)


async def to_thread(peer: Peer) -> Any:
    return await asyncio.to_thread(peer.receive)


def test_finished_sequence_is_not_aborted(tmp_path: Path) -> None:
    async def test() -> None:
        async with linked(tmp_path) as (link, peer):
            reader, running = Reader(), Reader()
            first = submit(link, reader, running)
            peer.receive()
            peer.send(outputs({first: [1]}, finish=FinishReason.LENGTH))
            await until(lambda: reader.finish)
            link.abort([first, first + 1, 12345])
            abort = await to_thread(peer)
            assert abort.sequence_ids.tolist() == [first + 1]

    run(test)


def test_rejection_reaches_its_request(tmp_path: Path) -> None:
    async def test() -> None:
        async with linked(tmp_path) as (link, peer):
            for reason in ("queue_full", "too_long", "bad_request"):
                reader = Reader()
                peer.send(Rejected(submit(link, reader), reason, "no"))
                await until(partial(getattr, reader, "error"))
                assert reader.error is not None
                assert reader.error.reason == reason

    run(test)


def test_health_follows_the_heartbeat(tmp_path: Path) -> None:
    now = [0.0]

    async def test() -> None:
        async with linked(tmp_path, lambda: now[0]) as (link, peer):

            async def hear(message: Heartbeat) -> None:
                peer.send(message)
                await until(
                    lambda: (
                        link.heartbeat is not None
                        and link.heartbeat.num_steps == message.num_steps
                        and link.heartbeat.num_running == message.num_running
                    )
                )

            await hear(heartbeat(1))
            now[0] += 100
            assert "no heartbeat" in (link.why_unhealthy() or "")
            await hear(heartbeat(2, 3))
            assert link.why_unhealthy() is None
            for _ in range(3):
                now[0] += STALL_SECONDS / 2
                before = link.heartbeat
                peer.send(heartbeat(2, 3))
                await until(lambda: link.heartbeat is not before)  # noqa: B023
            assert "has not stepped" in (link.why_unhealthy() or "")
            await hear(heartbeat(3, 3))
            assert link.why_unhealthy() is None

    run(test)


def test_idle_engine_stays_healthy_without_steps(tmp_path: Path) -> None:
    now = [0.0]

    async def test() -> None:
        async with linked(tmp_path, lambda: now[0]) as (link, peer):
            for _ in range(5):
                now[0] += STALL_SECONDS - 1
                before = link.heartbeat
                peer.send(heartbeat(7))
                await until(lambda: link.heartbeat is not before)  # noqa: B023
                assert link.why_unhealthy() is None

    run(test)


@pytest.mark.parametrize("reason", ["failed", "process"])
def test_death_fails_all_sequences_once(tmp_path: Path, reason: str) -> None:
    async def test() -> None:
        async with linked(tmp_path) as (link, peer):
            readers = [Reader(), Reader()]
            for reader in readers:
                submit(link, reader)
            if reason == "failed":
                peer.send(Failed("out of memory; lower --gpu-memory-utilization"))
            else:
                link.die("out of memory")
            assert (await link.dead).startswith("out of memory")
            link.die("later")
            assert all(reader.error is not None for reader in readers)
            assert link.state is State.DEAD
            assert link.why_unhealthy() == "the engine is dead"
            with pytest.raises(RequestFailedError):
                submit(link, Reader())
            link.abort([1, 2])

    run(test)


def test_last_message_of_the_engine_gives_the_reason(tmp_path: Path) -> None:
    async def test() -> None:
        async with linked(tmp_path) as (link, peer):
            peer.send(Failed("the disk is full"))
            assert link._socket.poll(60_000)  # the loop has not run
            link.die("exited with status 1")
            assert await link.dead == "the disk is full"

    run(test)


def test_unreadable_message_is_skipped(tmp_path: Path) -> None:
    async def test() -> None:
        async with linked(tmp_path) as (link, peer):
            reader = Reader()
            first = submit(link, reader)
            peer.send(b"", b"\x93", pack(Abort(np.array([1], np.int64))), outputs({first: [4]}))
            await until(lambda: reader.tokens)

    run(test)


def test_no_message_is_lost_while_sending(tmp_path: Path) -> None:
    async def test() -> None:
        async with linked(tmp_path) as (link, peer):
            reader = Reader(ends_at=10**9)
            first = submit(link, reader)
            for i in range(2000):
                peer.send(outputs({first: [i % 50]}))
                if i % 100 == 0:
                    submit(link, Reader())
                    await asyncio.sleep(0)
            await until(lambda: len(reader.tokens) == 2000)
            assert reader.tokens == [i % 50 for i in range(2000)]

    run(test)


def test_message_that_arrives_while_sending_is_read(
    tmp_path: Path,
) -> None:
    async def test() -> None:
        async with linked(tmp_path) as (link, peer):
            reader = Reader()
            first = submit(link, reader)
            peer.receive()
            peer.send(outputs({first: [4]}))
            assert link._socket.poll(60_000)  # the loop has not run
            submit(link, Reader())
            await until(lambda: reader.tokens)

    run(test)
