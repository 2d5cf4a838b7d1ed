"""Rank 0 and the other ranks of an engine: the messages of each step, and the report of a rank that ended."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from tokenspeed_core.api.executors import ExecutorJob, Settings, WorkerExit
from tokenspeed_core.api.step import LateInputs, StepFailed, StepPlan, StepResult, StepSize
from tokenspeed_core.engine.wire import pack
from tokenspeed_core.errors import EngineDeadError
from tokenspeed_core.executor import DistributedRunner, Ranks, ranks, worker_process
from tokenspeed_core.executor.local import LocalExecutor
from tokenspeed_core.executor.lockstep import Peers, connect_peers, empty_plan
from tokenspeed_core.executor.messages import (
    ChooseStep,
    Close,
    Forward,
    Joined,
    Offer,
    RankFailed,
    Sample,
    to_worker,
)
from tokenspeed_core.executor.worker_process import MAX_LINES
from tokenspeed_core.worker.process import follow

NUM_RANKS = 3
SECONDS = 60.0


class FakeExecutor:
    """Starts no process: the test sends and receives the messages of the ranks."""

    host: str | None = None

    def start(self, settings: Settings, on_exit: Callable[[WorkerExit], None]) -> None:
        self.settings, self.on_exit = settings, on_exit

    def close(self, seconds: float) -> None:
        pass


class FakeRunner:
    """Records its calls, and what each other rank has received at the time of a call."""

    def __init__(self, receive: Callable[[], Sequence[bytes]] = tuple) -> None:
        self.calls: list[tuple[str, int]] = []
        self.received: list[Sequence[bytes]] = []
        self._receive = receive

    def step_size(self, plan: StepPlan) -> StepSize:
        return StepSize(plan.num_rows)

    def choose_shared_step(self, sizes: Sequence[StepSize]) -> bool:
        self._note("choose", len(sizes))
        return True

    def forward(self, plan: StepPlan) -> None:
        self._note("forward", plan.step_id)

    def sample(self, step_id: int, late: LateInputs | None) -> None:
        self._note("sample", step_id)

    def collect(self, step_id: int) -> StepResult:
        self.calls.append(("collect", step_id))
        none = np.zeros(0, np.int32)
        return StepResult(step_id, none, none, None)

    def close(self) -> None:
        self._note("close", -1)

    def _note(self, name: str, step_id: int) -> None:
        self.calls.append((name, step_id))
        self.received.append(self._receive())


class World:
    """`Ranks` without processes, and the sockets of its other ranks."""

    def __init__(
        self, peers: Peers | None = None, files: Mapping[int, Mapping[str, str]] | None = None
    ) -> None:
        """Start. `files` are the digests of the model files by rank."""
        self.executor = FakeExecutor()
        self.failures: list[str] = []
        self.ranks = Ranks(self.executor, NUM_RANKS, peers)
        self.ranks.start({}, self.failures.append)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._plans = [self._connect(zmq.SUB, "plans") for _ in range(1, NUM_RANKS)]
        self._reports = self._connect(zmq.PUSH, "reports")
        for rank, plans in enumerate(self._plans, 1):
            plans.subscribe(b"")
            self.report(Joined(rank, dict(files[rank]) if files else {}))
        try:
            self.ranks.wait_joined(files[0] if files else {})
        except EngineDeadError:
            self.close()
            raise

    def report(self, message: Joined | Offer | RankFailed) -> None:
        self._reports.send(pack(message))

    def receive(self) -> list[bytes]:
        """Return the next message of each other rank."""
        assert all(plans.poll(1000 * SECONDS) for plans in self._plans), "a rank received nothing"
        return [plans.recv() for plans in self._plans]

    def close(self) -> None:
        self.ranks.close()
        self._context.destroy(linger=0)

    def _connect(self, kind: int, name: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.connect(self.executor.settings[name])
        return socket


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def plan(step_id: int) -> StepPlan:
    return empty_plan(step_id, [step_id], 1)


def test_all_ranks_get_the_bytes_of_one_encoding(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed: list[bytes] = []

    def counted(message: Any) -> bytes:
        packed.append(pack(message))
        return packed[-1]

    monkeypatch.setattr(ranks, "pack", counted)
    runner = FakeRunner(world.receive)
    distributed = DistributedRunner(runner, world.ranks)
    # Two steps in flight.
    distributed.forward(plan(0))
    distributed.sample(0, None)
    for step_id in (1, 2):
        distributed.forward(plan(step_id))
        distributed.sample(step_id, LateInputs(*(np.full(1, step_id, np.int32),) * 2))
        distributed.collect(step_id - 1)
    distributed.collect(2)
    distributed.close()

    # Each call reaches all ranks before rank 0 executes it, and `collect` sends nothing.
    assert runner.received == [[each] * (NUM_RANKS - 1) for each in packed]
    messages = [to_worker.unpack(each) for each in packed]
    sent = [
        ("forward", message.plan.step_id)
        if isinstance(message, Forward)
        else ("sample", message.step_id)
        for message in messages[:-1]
    ]
    assert sent == [(name, step_id) for step_id in range(3) for name in ("forward", "sample")]
    assert [call for call in runner.calls if call[0] != "collect"] == [*sent, ("close", -1)]
    assert [step_id for name, step_id in runner.calls if name == "collect"] == [0, 1, 2]
    assert [message.plan.slots.tolist() for message in messages[:-1:2]] == [[0], [1], [2]]
    assert [message.late.mask.tolist() for message in messages[3::2]] == [[1], [2]]
    assert isinstance(messages[-1], Close)


def test_all_ranks_choose_the_step_that_engines_share(world: World) -> None:
    runner = FakeRunner(world.receive)
    sizes = [StepSize(3, 2), StepSize(0, 0, 1, 7, is_eager=True, no_shared_prefix=False)]
    assert DistributedRunner(runner, world.ranks).choose_shared_step(sizes)
    ((first, second),) = runner.received
    assert to_worker.unpack(first).sizes == to_worker.unpack(second).sizes == tuple(sizes)


def test_rank_executes_the_steps_in_order_and_collects_the_oldest() -> None:
    runner = FakeRunner()
    messages = [
        message
        for step_id in range(3)
        for message in (Forward(plan(step_id)), Sample(step_id, None))
    ]

    class RankZero:
        def __init__(self) -> None:
            choice = ChooseStep((StepSize(1), StepSize()))
            self._messages = iter([choice, *messages, Close()])

        def receive(self) -> Any:
            return next(self._messages)

    follow(runner, RankZero())  # type: ignore[arg-type]
    assert runner.calls == [
        ("choose", 2),
        *[("forward", 0), ("sample", 0)],
        *[("forward", 1), ("sample", 1), ("collect", 0)],
        *[("forward", 2), ("sample", 2), ("collect", 1)],
    ]


def test_ranks_agree_on_the_smallest_value(world: World) -> None:
    for values in ((5, 9), (12, 7)):
        for rank, value in enumerate(values, 1):
            world.report(Offer(rank, value))
        assert world.ranks.gather_min(8) == min(8, *values)


def test_rank_with_another_model_is_named_with_the_files() -> None:
    ours = {"config.json": "1", "a.safetensors": "2", "b.safetensors": "3"}
    same = {"config.json": "1", "a.safetensors": "2"}
    other = {**ours, "b.safetensors": "4"}
    with pytest.raises(EngineDeadError, match=r"rank 2 of 3 .*model.*different: b\.safetensors\)"):
        World(files={0: ours, 1: same, 2: other})


def test_first_failure_is_reported_once_and_ends_the_steps(world: World) -> None:
    distributed = DistributedRunner(FakeRunner(), world.ranks)
    world.report(RankFailed(2, "no memory"))
    reason = world.ranks.wait_for_failure(SECONDS)
    assert reason is not None
    assert f"rank 2 of {NUM_RANKS}" in reason
    assert "no memory" in reason
    world.executor.on_exit(WorkerExit(2, "exited with status 1", ()))
    world.executor.on_exit(WorkerExit(1, "was killed by SIGABRT", ()))
    with pytest.raises(StepFailed) as failed:
        distributed.forward(plan(0))
    assert str(failed.value) == reason
    assert world.failures == [reason]


def test_failure_of_a_rank_ends_the_other_engines() -> None:
    first, second = (Peers(fds) for fds in connect_peers(2))
    world = World(first)
    world.executor.on_exit(WorkerExit(2, "was killed by SIGKILL", ("its log",)))
    with pytest.raises(StepFailed, match=rf"engine 0 of 2.* rank 2 of {NUM_RANKS} .*SIGKILL"):
        second.is_waiting()
    assert first.failure == world.ranks.failure
    for each in (world, first, second):
        each.close()


def test_failure_after_the_end_of_an_engine_names_the_engine() -> None:
    first, second = (Peers(fds) for fds in connect_peers(2))
    world = World(first)
    second.fail("rank 1 of 2 was killed by SIGKILL")
    with pytest.raises(StepFailed):
        first.is_waiting()
    world.report(RankFailed(2, "connection closed by peer"))
    reason = world.ranks.wait_for_failure(SECONDS)
    assert reason is not None
    assert "engine 1 of 2" in reason
    assert "SIGKILL" in reason
    assert "connection closed" not in reason
    for each in (world, first, second):
        each.close()


def test_result_is_refused_if_a_rank_ended_during_the_step(world: World) -> None:
    distributed = DistributedRunner(FakeRunner(), world.ranks)
    distributed.forward(plan(0))
    distributed.sample(0, None)
    world.executor.on_exit(WorkerExit(1, "was killed by SIGKILL", ()))
    with pytest.raises(StepFailed, match=f"rank 1 of {NUM_RANKS}"):
        distributed.collect(0)


def test_failed_collective_is_attributed_to_the_rank_that_ended(world: World) -> None:
    class Waiting(FakeRunner):
        def collect(self, step_id: int) -> StepResult:
            world.executor.on_exit(WorkerExit(1, "was killed by SIGKILL", ("out of memory",)))
            raise StepFailed("the collective was aborted")

    distributed = DistributedRunner(Waiting(), world.ranks)
    distributed.forward(plan(0))
    distributed.sample(0, None)
    with pytest.raises(StepFailed, match=rf"(?s)rank 1 of {NUM_RANKS} .*SIGKILL.*out of memory"):
        distributed.collect(0)


def test_report_of_a_rank_wins_over_its_exit(world: World) -> None:
    end = WorkerExit(2, "exited with status 1", ())
    noticing = threading.Thread(target=world.executor.on_exit, args=(end,))
    noticing.start()
    world.report(RankFailed(2, "no memory"))
    noticing.join()
    assert world.failures == [f"rank 2 of {NUM_RANKS} failed: no memory"]


FAILING_WORKER = """
import os
from tokenspeed_core.errors import ConfigError
from tokenspeed_core.worker import process

def fail(settings, rank_zero):
    raise ConfigError("too few experts")

process._run = fail
os._exit(process.main())
"""


def test_error_of_a_rank_arrives_before_its_exit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "failing_worker.py").write_text(FAILING_WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(worker_process, "WORKER_MODULE", "failing_worker")
    made = Ranks(LocalExecutor(ExecutorJob(1, 2, "cpu")), 2)
    try:
        made.start({}, lambda reason: None)
        assert made.wait_for_failure(SECONDS) == "rank 1 of 2 failed: too few experts"
    finally:
        made.close()


DYING_WORKER = f"""
import os, signal, sys
for number in range({MAX_LINES} + 5):
    print("line", number, file=sys.stdout if number % 2 else sys.stderr, flush=True)
os.kill(os.getpid(), signal.{{signal}})
"""


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV"])
def test_message_about_an_ended_worker_has_its_last_log_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    (tmp_path / "dying_worker.py").write_text(DYING_WORKER.format(signal=name))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(worker_process, "WORKER_MODULE", "dying_worker")
    made = Ranks(LocalExecutor(ExecutorJob(1, 2, "cpu")), 2)
    failures: list[str] = []
    try:
        made.start({}, failures.append)
        reason = made.wait_for_failure(SECONDS)
    finally:
        made.close()
    assert reason is not None
    first, *lines = reason.splitlines()
    assert "rank 1 of 2" in first
    assert name in first
    expected = [f"line {number}" for number in range(MAX_LINES + 5)]
    assert [line.strip() for line in lines] == expected[-MAX_LINES:]
    assert failures == [reason]
    # The log is copied to the engine's stderr.
    assert set(expected) <= set(capfd.readouterr().err.splitlines())
