"""The host's time for a decode step: plan, launch, apply and the packed message, with a runner that does nothing.

Rows cross block boundaries at different steps, as they do when requests arrive at different times. `floor_us` is the
time of packing the message alone, a lower bound for the step; `target_us` is the budget. Example:

    python benchmarks/host_step.py
    python benchmarks/host_step.py --rows 256 --profile
"""

from __future__ import annotations

import argparse
import cProfile
import json
import platform
import pstats
import statistics
import time

import numpy as np
from tokenspeed_bench.result import machine
from tokenspeed_testing.requests import request

from tokenspeed_core.api.cache_groups import FullAttention
from tokenspeed_core.api.step import LateInputs, StepPlan, StepResult
from tokenspeed_core.engine.engine import Engine
from tokenspeed_core.engine.wire import pack
from tokenspeed_core.kv_cache.manager import KVManager
from tokenspeed_core.scheduler.limits import SchedulerLimits
from tokenspeed_core.scheduler.policy import POLICIES
from tokenspeed_core.scheduler.scheduler import Scheduler

BLOCK_SIZE = 16
VOCAB_SIZE = 100_000
SLACK = 1024  # steps that the prompts may take, while the first rows decode
TARGETS_US = {1: 100, 256: 400}


class IdleRunner:
    """Returns the same token for every row, immediately."""

    def __init__(self) -> None:
        """Launch nothing yet."""
        self._results: dict[int, StepResult] = {}

    def forward(self, plan: StepPlan) -> None:
        """Store the result."""
        num_tokens = plan.wants_logits.astype(np.int32)
        tokens = np.full(int(num_tokens.sum()), 7, np.int32)
        self._results[plan.step_id] = StepResult(plan.step_id, num_tokens, tokens, None)

    def sample(self, step_id: int, late: LateInputs | None) -> None:
        """Do nothing."""

    def collect(self, step_id: int) -> StepResult:
        """Return the result."""
        return self._results.pop(step_id)

    def close(self) -> None:
        """Do nothing."""


def decoding(num_rows: int, context: int, num_steps: int) -> Engine:
    """Return an engine in which `num_rows` sequences decode."""
    max_len = context + BLOCK_SIZE + num_steps + SLACK
    kv = KVManager(
        (FullAttention("full", 1, 1, 1),), BLOCK_SIZE, (num_rows + 1) * (max_len // BLOCK_SIZE + 2)
    )
    limits = SchedulerLimits(num_rows, max_len, 1 << 20, 1 << 20, 1 << 20, VOCAB_SIZE)
    engine = Engine(Scheduler(limits, kv, POLICIES["fcfs"]), IdleRunner())
    for i in range(num_rows):
        # A unique prompt, so that no prefix is shared.
        prompt = np.full(context + i % BLOCK_SIZE, (i + 1) % VOCAB_SIZE, np.int32)
        stop = np.asarray([2], np.int32)
        engine.submit(request(i + 1, prompt, max_tokens=num_steps + SLACK, stop_token_ids=stop))
    while engine.scheduler.sequences.num_running < num_rows or len(
        engine.scheduler.columns.prefilling()
    ):
        engine.step()
    return engine


def step_times(engine: Engine, num_steps: int) -> list[float]:
    """Return the microseconds of each step, its message to the API process packed."""
    times = []
    for _ in range(num_steps):
        begin = time.perf_counter()
        for outputs in engine.step():
            pack(outputs)
        times.append(1e6 * (time.perf_counter() - begin))
    return times


def floor(engine: Engine, num_steps: int) -> float:
    """Return the median microseconds of packing the message of a step, of `num_steps` times."""
    messages, times = engine.step(), []
    for _ in range(num_steps):
        begin = time.perf_counter()
        for outputs in messages:
            pack(outputs)
        times.append(1e6 * (time.perf_counter() - begin))
    return statistics.median(times)


def main() -> None:
    """Measure every number of rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    arguments = parser.parse_args()
    for num_rows in arguments.rows:
        engine = decoding(num_rows, arguments.context, arguments.steps)
        profiler = cProfile.Profile()
        if arguments.profile:
            profiler.enable()
        times = sorted(step_times(engine, arguments.steps))
        profiler.disable()
        median, least = statistics.median(times), floor(engine, arguments.steps)
        print(
            json.dumps(
                {
                    "rows": num_rows,
                    "context": arguments.context,
                    "median_us": round(median, 1),
                    "p10_us": round(times[len(times) // 10], 1),
                    "p99_us": round(times[-len(times) // 100], 1),
                    "target_us": TARGETS_US.get(num_rows),
                    "floor_us": round(least, 1),
                    "over_floor": round(median / least, 1),
                    "machine": machine(),
                    "python": platform.python_version(),
                    "numpy": np.__version__,
                }
            ),
            flush=True,
        )
        if arguments.profile:
            pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
