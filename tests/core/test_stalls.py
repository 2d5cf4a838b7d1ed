"""No request keeps the engine's thread for more than 50 ms at once, in CPU time, while a sequence runs."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import zmq
from tokenspeed_testing.requests import request

from tokenspeed_core.api.cache_groups import FullAttention, SlidingWindow
from tokenspeed_core.api.step import I32, LateInputs, StepPlan, StepResult
from tokenspeed_core.engine.engine import Engine
from tokenspeed_core.engine.messages import Abort, Drain, Outputs, Ready, Submit
from tokenspeed_core.engine.process import EngineLoop
from tokenspeed_core.engine.transport import bind
from tokenspeed_core.engine.wire import pack
from tokenspeed_core.kv_cache.manager import KVManager
from tokenspeed_core.scheduler.limits import SchedulerLimits
from tokenspeed_core.scheduler.policy import POLICIES
from tokenspeed_core.scheduler.scheduler import Scheduler

MAX_SECONDS = 0.050
NUM_ROUNDS = 3  # the best counts: a garbage collection may fall into any of them
CONTEXT = 2**18
NUM_ROWS = 256
GROUPS = (FullAttention("full", 1, 1, 1), SlidingWindow("window", 1, 1, 1, 1024))
NUM_STEPS = 400
NEVER = 0
RUNNING, ATTACK = 1, 1000


class IdleRunner:
    """Answers each plan at once with the same token for every row."""

    def __init__(self) -> None:
        self._results: dict[int, StepResult] = {}

    def forward(self, plan: StepPlan) -> None:
        num_tokens = plan.wants_logits.astype(np.int32)
        tokens = np.full(int(num_tokens.sum()), 7, np.int32)
        self._results[plan.step_id] = StepResult(plan.step_id, num_tokens, tokens, None)

    def sample(self, step_id: int, late: LateInputs | None) -> None:
        return None

    def collect(self, step_id: int) -> StepResult:
        return self._results.pop(step_id)

    def close(self) -> None:
        return None


class TimedEngine(Engine):
    """Notes the CPU time from each step to the next, and lets its client abort requests before a step."""

    send_abort: Callable[[], None]
    abort_at: int

    def begin(self, abort_at: int, send_abort: Callable[[], None]) -> None:
        """Start to take times. `send_abort` is called before the step `abort_at`."""
        self.abort_at, self.send_abort = abort_at, send_abort
        self.turns: list[float] = []
        self._since = time.thread_time()

    def step(self) -> list[Outputs]:
        now = time.thread_time()
        self.turns.append(now - self._since)
        if len(self.turns) == self.abort_at:
            self.send_abort()
        self._since = time.thread_time()
        return super().step()


def start() -> TimedEngine:
    """Return an engine in which one sequence decodes."""
    kv = KVManager(GROUPS, 16, 4 * CONTEXT // 16, max_chunk=8192)
    limits = SchedulerLimits(NUM_ROWS, CONTEXT, 8192, 8192, 4096, 1000)
    engine = TimedEngine(Scheduler(limits, kv, POLICIES["fcfs"]), IdleRunner())
    engine.begin(0, lambda: None)
    engine.submit(request(RUNNING, np.full(100, 3, np.int32), max_tokens=NUM_STEPS))
    for _ in range(20):
        engine.step()
    return engine


def prompt(length: int, seed: int) -> I32:
    return np.random.default_rng(seed).integers(10, 900, length).astype(np.int32)


def longest_turn(requests: Sequence[Submit], abort_at: int) -> float:
    """Return the longest turn of the engine's loop, in CPU seconds, with these requests and their abort."""
    engine, context = start(), zmq.Context.instance()
    address, ids = f"inproc://stalls-{id(engine)}", []
    for each in requests:
        ids += range(each.request_id, each.request_id + each.n)
    reading, writing = os.pipe()
    with bind(address) as socket, context.socket(zmq.PAIR) as client:
        client.set_hwm(0)
        client.connect(address)
        for message in (*requests, Drain()):
            client.send(pack(message))
        engine.begin(abort_at, lambda: client.send(pack(Abort(np.array(ids, np.int64)))))
        EngineLoop(engine, Ready(CONTEXT, CONTEXT, 1000, ""), [socket], reading).run()
    os.close(reading)
    os.close(writing)
    counts = engine.scheduler.kv.counts()
    assert counts.held == counts.pending == 0
    return max(engine.turns)


@pytest.mark.release
@pytest.mark.parametrize("abort_at", [NEVER, 60])
@pytest.mark.parametrize(
    "requests",
    [
        pytest.param([request(ATTACK, prompt(CONTEXT - 40, 1), max_tokens=32)], id="256k tokens"),
        pytest.param(
            [request(ATTACK, prompt(CONTEXT - 40, 1), n=128, max_tokens=32)],
            id="128 of 256k tokens",
        ),
        pytest.param(
            [request(ATTACK + i, prompt(4096, i), max_tokens=32) for i in range(512)],
            id="512 prompts",
        ),
        pytest.param([request(ATTACK, prompt(10, 1), n=1024, max_tokens=64)], id="1024 sequences"),
        pytest.param(
            [request(ATTACK, np.full(CONTEXT - 40, 5, np.int32), max_tokens=32)], id="one token"
        ),
    ],
)
def test_requests_do_not_stall_the_engine(requests: list[Submit], abort_at: int) -> None:
    gc.collect()
    gc.freeze()  # as the engine's process does
    try:
        seconds = min(longest_turn(requests, abort_at) for _ in range(NUM_ROUNDS))
    finally:
        gc.unfreeze()
    print(f"{1e3 * seconds:.1f} ms")
    assert seconds < MAX_SECONDS
