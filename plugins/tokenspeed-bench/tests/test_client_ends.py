"""Interrupted loads keep their answers and leave no client process."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import psutil
import pytest
from misbehaving import STREAM, Exchange, good, serving
from tokenspeed_bench import client, connection, online
from tokenspeed_bench import result as results
from tokenspeed_bench.client import Answers, LoadOptions, run
from tokenspeed_bench.connection import Target
from tokenspeed_bench.metrics import of_records
from tokenspeed_bench.mock_server import client_cost
from tokenspeed_bench.signals import child_processes, terminate_as_interrupt
from tokenspeed_bench.traffic import load

ONE = LoadOptions(1, None, 1)


def ask(url: str, num: int, pace: LoadOptions = ONE) -> Answers:
    return run(Target(url, "m"), load(num, 10, 4, is_fixed=True).sessions, pace)


def num_clients() -> int:
    """Count the client processes; earlier tests may have left other subprocesses running."""
    return sum(isinstance(each, ForkProcess) for each in multiprocessing.active_children())


KILLED = """
import os, signal, sys, time
from tokenspeed_bench import client
from tokenspeed_bench.connection import Target
from tokenspeed_bench.traffic import load

def die_after_load(clients, shared, total, *others):
    while shared.num_done.value < total:
        time.sleep(0.05)
    time.sleep(0.5)
    print(*(each.pid for each in clients), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

client._gather = die_after_load
client.run(Target(sys.argv[1], "m"), load(200, 10, 60, is_fixed=True).sessions, client.LoadOptions(4, None, 1))
"""


def test_clients_end_when_the_parent_is_killed(
    tmp_path: Path,
) -> None:
    async def at_once(exchange: Exchange) -> None:
        exchange.writer.write(STREAM)
        await exchange.tokens(60)
        exchange.end(60)

    with (
        serving(at_once) as fake,
        (tmp_path / "pids").open("w+") as out,
    ):  # not a pipe: a client that survives would keep it open
        words = [sys.executable, "-P", "-c", KILLED, fake.url]
        assert (
            subprocess.run(words, stdout=out, check=False, timeout=60).returncode == -signal.SIGKILL
        )
    (pid,) = (tmp_path / "pids").read_text().split()
    try:
        client_process = psutil.Process(int(pid))
    except psutil.NoSuchProcess:
        return  # it has ended already
    _, left = psutil.wait_procs([client_process], timeout=20)
    for each in left:
        each.kill()
    assert left == []


def test_ctrl_c_keeps_finished_answers() -> None:
    async def mostly_hangs(exchange: Exchange) -> None:
        if exchange.number == 4:  # the users wait for it and the one before
            os.kill(os.getpid(), signal.SIGINT)
        if exchange.number >= 3:
            await asyncio.sleep(60)
        await good(exchange)

    with serving(mostly_hangs) as fake:
        begin = time.monotonic()
        answers = ask(fake.url, num=8, pace=LoadOptions(2, None, 2))
    assert answers.is_interrupted
    assert len(answers.records) == 3
    assert time.monotonic() - begin < 55


def test_ctrl_c_during_progress_leaves_no_client() -> None:
    async def hangs(exchange: Exchange) -> None:
        await asyncio.sleep(60)

    with serving(hangs) as fake:
        target, sessions = Target(fake.url, "m"), load(2, 10, 4, is_fixed=True).sessions
        answers = run(
            target,
            sessions,
            LoadOptions(2, None, 2),
            lambda done, total: signal.raise_signal(signal.SIGINT),
        )
    assert answers.is_interrupted
    assert num_clients() == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_before_clients_start_counts_no_failures(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def interrupted(clients: Sequence[ForkProcess]) -> Iterator[None]:
        with child_processes(clients):
            signal.raise_signal(number)
            yield

    monkeypatch.setattr(client, "child_processes", interrupted)
    with serving(good) as fake, terminate_as_interrupt():
        answers = ask(fake.url, num=4000, pace=LoadOptions(2, None, 2))
    assert answers.is_interrupted
    assert len(answers.records) < 4000
    assert answers.failures == []
    assert num_clients() == 0


def test_interrupt_while_joining_clients_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def join(process: ForkProcess) -> None:
        signal.raise_signal(signal.SIGINT)
        original_join(process)

    original_join = ForkProcess.join
    monkeypatch.setattr(ForkProcess, "join", join)
    with serving(good) as fake:
        answers = ask(fake.url, num=2)
    assert (answers.is_interrupted, len(answers.records)) == (True, 2)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_after_last_answer_keeps_the_load(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*given: Any) -> dict[str, Any]:
        signal.raise_signal(number)
        return of_records(*given)

    monkeypatch.setattr(online, "of_records", interrupted)
    result = results.new("serve", "m", None, {})
    plan = online.Online(
        [online.Load(load(2, 10, 2, is_fixed=True), ONE)] * 2, measures_client=False
    )
    with serving(good) as fake, terminate_as_interrupt():
        online.measure(Target(fake.url, "m"), plan, result, lambda run: None)
    assert [run["traffic"]["name"] for run in result["runs"]] == ["first", "load"]
    assert result["runs"][-1]["figures"]["answered"] == 2
    assert result["is_interrupted"]
    assert "is_part" not in result["runs"][-1]


def test_client_without_a_result_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def never_returns(*given: Any) -> None:
        time.sleep(60)

    monkeypatch.setattr(client, "_client", never_returns)
    monkeypatch.setattr(client, "RESULT_SECONDS", 0.2)
    answers = run(
        Target("http://h", "m"), load(2, 10, 2, is_fixed=True).sessions, ONE, None, lambda: True
    )
    assert answers.failures == ["a client process returned no answers within 0 s"]


def test_cancelled_user_sends_no_further_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class FakeConnection:
        def __init__(self) -> None:
            self.answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def ask(self, data: bytes) -> asyncio.Future[None]:
            return self.answer

    async def cancel_after_answer() -> None:
        fake = FakeConnection()

        async def connect(target: Target) -> FakeConnection:
            return fake

        monkeypatch.setattr(connection, "connect", connect)
        task = asyncio.ensure_future(connection.User(Target("http://h", "m")).ask(b""))
        await asyncio.sleep(0)
        fake.answer.set_result(None)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel_after_answer())


def test_failing_progress_callback_leaves_no_client() -> None:
    with serving(good) as fake, pytest.raises(ZeroDivisionError):
        run(
            Target(fake.url, "m"),
            load(500, 10, 4, is_fixed=True).sessions,
            ONE,
            lambda done, total: 1 // 0,
        )
    assert num_clients() == 0


def test_ctrl_c_during_client_measurement_keeps_the_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(pace: LoadOptions) -> dict[str, Any]:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        return client_cost(pace)

    monkeypatch.setattr(online, "client_cost", interrupted)
    result = results.new("serve", "m", None, {})
    plan = online.Online([online.Load(load(2, 10, 2, is_fixed=True), ONE)] * 2)
    with serving(good) as fake:
        online.measure(Target(fake.url, "m"), plan, result, lambda run: None)
    first, run = result["runs"]
    assert result["is_interrupted"]
    assert (first["traffic"]["name"], run["figures"]["answered"]) == ("first", 2)
    assert not run.keys() & {"is_part", "client"}


@pytest.mark.parametrize("number", [0, 4])
def test_ctrl_c_during_first_requests_reports_no_failures(number: int) -> None:
    async def interrupts(exchange: Exchange) -> None:
        if exchange.number >= number:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(60)
        await good(exchange)

    result = results.new("serve", "m", None, {})
    with serving(interrupts) as fake:
        online.measure(Target(fake.url, "m"), online.Online([]), result, lambda run: None)
    assert result["is_interrupted"]
    assert result["runs"] == []
