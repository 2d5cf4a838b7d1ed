"""Load generator: streamed completions against an OpenAI-compatible server, from several processes.

Without a rate the loop is closed: each user sends its next request when its last one is done. With
a rate, sessions arrive by a seeded Poisson process.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.context import ForkProcess
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from queue import Empty
from typing import Any

from tokenspeed_bench.connection import RequestFailed, Target, User
from tokenspeed_bench.metrics import Record
from tokenspeed_bench.signals import child_processes, deferred_interrupts, ignore_signals
from tokenspeed_bench.traffic import Session

SEED_OF_ARRIVALS = 7
START_SECONDS = 0.5  # for the client processes to start
POLL_SECONDS = 0.1  # between checks of the clients' progress
RESULT_SECONDS = 10.0  # that a stopped client has to return its answers


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How requests are sent: by `users` concurrent users, or `rate` sessions per second, from `procs` processes."""

    users: int
    rate: float | None = None
    procs: int = 4


@dataclass(slots=True)
class Answers:
    """The result of a load. `failures` has one message per failed request."""

    records: list[Record] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    is_interrupted: bool = False


@dataclass(frozen=True, slots=True)
class _Shared:
    """State shared by the client processes and their parent."""

    go: Event
    stop: Event
    num_done: Any
    out: Queue[Answers]
    parent: int  # its process id


def run(
    target: Target,
    sessions: Sequence[Session],
    pace: LoadOptions,
    report: Callable[[int, int], None] | None = None,
    is_enough: Callable[[], bool] | None = None,
) -> Answers:
    """Send the sessions and return the answers.

    Ctrl-C, or `is_enough()` returning true, stops early and returns the answers so far.
    `report(done, total)` is called with the progress. No client process survives the call.
    """
    context = multiprocessing.get_context("fork")
    shared = _Shared(
        context.Event(), context.Event(), context.Value("i", 0), context.Queue(), os.getpid()
    )
    arrivals = _arrivals(len(sessions), pace.rate)
    num_procs = max(1, min(pace.procs, pace.users if pace.rate is None else len(sessions)))
    clients = [
        context.Process(
            target=_client,
            daemon=True,
            args=(
                target,
                sessions[i::num_procs],
                arrivals[i::num_procs],
                pace.users // num_procs + (i < pace.users % num_procs),
                shared,
            ),
        )
        for i in range(num_procs)
    ]
    total = sum(len(session.turns) for session in sessions)
    with deferred_interrupts() as was_interrupted, child_processes(clients):
        time.sleep(START_SECONDS)
        shared.go.set()
        answers = _gather(
            clients,
            shared,
            total,
            report or (lambda done, total: None),
            lambda: was_interrupted() or (is_enough is not None and is_enough()),
        )
    answers.is_interrupted = was_interrupted()
    return answers


def _arrivals(num: int, rate: float | None) -> list[float | None]:
    """Return the start time of each session in seconds, or None to start when a user is free."""
    if rate is None:
        return [None] * num
    rng, now = random.Random(SEED_OF_ARRIVALS), 0.0
    times: list[float | None] = []
    for _ in range(num):
        times.append(now)
        now += rng.expovariate(rate)
    return times


def _gather(
    clients: Sequence[ForkProcess],
    shared: _Shared,
    total: int,
    report: Callable[[int, int], None],
    is_enough: Callable[[], bool],
) -> Answers:
    """Collect the answers of every client process."""
    answers, num_parts, deadline = Answers(), 0, float("inf")
    while (
        num_missing := len(clients)
        - num_parts
        - sum(each.exitcode not in (None, 0) for each in clients)
    ) > 0:
        try:
            part = shared.out.get(timeout=POLL_SECONDS)
        except Empty:
            report(shared.num_done.value, total)
            if time.monotonic() > deadline:
                break
        else:
            num_parts += 1
            answers.records += part.records
            answers.failures += part.failures
        if not shared.stop.is_set() and is_enough():
            shared.stop.set()
            deadline = time.monotonic() + RESULT_SECONDS
    answers.failures += [
        f"a client process ended with exit code {each.exitcode}"
        for each in clients
        if each.exitcode
    ]
    answers.failures += [
        f"a client process returned no answers within {RESULT_SECONDS:.0f} s"
    ] * max(0, num_missing)
    report(shared.num_done.value, total)
    return answers


def _client(
    target: Target,
    sessions: Sequence[Session],
    arrivals: Sequence[float | None],
    num_users: int,
    shared: _Shared,
) -> None:
    """Run one client process until the parent has its answers and kills it."""
    ignore_signals()  # the parent handles them
    # Otherwise a client of a killed parent would wait forever, and keep the server's output pipe open.
    shared.out.cancel_join_thread()
    shared.out.put(asyncio.run(_until_stopped(target, sessions, arrivals, num_users, shared)))
    while os.getppid() == shared.parent:
        time.sleep(POLL_SECONDS)


async def _until_stopped(
    target: Target,
    sessions: Sequence[Session],
    arrivals: Sequence[float | None],
    num_users: int,
    shared: _Shared,
) -> Answers:
    answers = Answers()
    requests = [_requests(target, session) for session in sessions]
    while not shared.go.wait(POLL_SECONDS) and os.getppid() == shared.parent:
        pass
    begin = time.perf_counter()
    waiting = iter(requests)

    async def closed() -> None:
        user = User(target)
        for session in waiting:
            await _run_session(user, session, answers, shared.num_done)
        user.close()

    async def arriving(session: list[tuple[float, bytes]], at: float) -> None:
        await asyncio.sleep(max(0.0, begin + at - time.perf_counter()))
        user = User(target)
        await _run_session(user, session, answers, shared.num_done)
        user.close()

    timed = [
        arriving(each, at) for each, at in zip(requests, arrivals, strict=True) if at is not None
    ]
    tasks = [asyncio.ensure_future(each) for each in timed or (closed() for _ in range(num_users))]
    pending = set(tasks)
    while pending and not shared.stop.is_set() and os.getppid() == shared.parent:
        _, pending = await asyncio.wait(pending, timeout=POLL_SECONDS)
    for task in pending:
        task.cancel()
    for end in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(end, BaseException) and not isinstance(end, asyncio.CancelledError):
            answers.failures.append(f"{type(end).__name__}: {end}")
    return answers


def _requests(target: Target, session: Session) -> list[tuple[float, bytes]]:
    """Return the request bodies of a session, each with the pause before it."""
    words = [str(token).encode() for token in session.ids]
    head = target.head()
    bodies = [
        (turn.pause, target.body(b", ".join(words[: turn.end]), turn.out_len))
        for turn in session.turns
    ]
    return [(pause, head % len(body) + body) for pause, body in bodies]


async def _run_session(
    user: User, requests: Sequence[tuple[float, bytes]], answers: Answers, num_done: Any
) -> None:
    """Run the turns of a session. A failed turn ends it, because its history is incomplete."""
    for turn, (pause, data) in enumerate(requests):
        if pause:
            await asyncio.sleep(pause)
        try:
            record = await user.ask(data)
        except RequestFailed as error:
            answers.failures += [str(error)] + ["not sent: an earlier turn failed"] * (
                len(requests) - turn - 1
            )
            return
        answers.records.append(replace(record, turn=turn) if turn else record)
        with num_done.get_lock():
            num_done.value += 1
