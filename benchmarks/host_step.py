"""Measure the host's time for a decode step: plan, launch, apply and the packed message. The runner computes nothing.

Rows cross block boundaries at different steps, as they do when requests arrive at different times. Times are CPU time.
`floor_us` is the time of packing the message alone, a lower bound for the step; `target_us` is the budget. With drafts,
`critical_us` is the part between the result of a step and the launch of the next one, in which the device idles. Example:

    python benchmarks/host_step.py
    python benchmarks/host_step.py --rows 256 --profile
    OMP_NUM_THREADS=1 python benchmarks/host_step.py --rows 1 32 --drafts 0 4 --worker --context 256

With `--drafts N`, a drafter proposes N tokens for each row, and only steps with draft tokens are measured. Most tokens
are accepted: the outputs repeat, and deviate at every 31st token. `--drafts paused` measures while drafting is paused.
`--worker` adds a worker on the CPU, which fills the buffers of captured steps. Their graphs are empty.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import platform
import pstats
import statistics
from collections.abc import Callable
from time import thread_time
from typing import Any

import numpy as np
from tokenspeed_bench.result import machine
from tokenspeed_testing.requests import request

from tokenspeed_core.api.cache_groups import FullAttention
from tokenspeed_core.api.drafters import DrafterContext
from tokenspeed_core.api.step import I32, LateInputs, Runner, StepPlan, StepResult
from tokenspeed_core.engine.engine import Engine
from tokenspeed_core.engine.wire import pack
from tokenspeed_core.kv_cache.manager import KVManager
from tokenspeed_core.scheduler.draft_depth import AdaptiveDepth
from tokenspeed_core.scheduler.drafts import FinishedStep, HostDrafts
from tokenspeed_core.scheduler.limits import SchedulerLimits
from tokenspeed_core.scheduler.policy import POLICIES
from tokenspeed_core.scheduler.scheduler import Scheduler

BLOCK_SIZE = 16
VOCAB_SIZE = 100_000
SLACK = 1024  # steps that the prompts may take, while the first rows decode
TARGETS_US = {1: 100, 256: 400}
PERIOD, DEVIATION = 50, 31  # of the repeated text, and of the tokens that deviate from it
PAUSED = "paused"


def text(start: int, end: int) -> I32:
    """Return the tokens at the positions `[start, end)` of every sequence."""
    positions = np.arange(start, end, dtype=np.int32)
    return np.where(positions % DEVIATION, 7 + positions % PERIOD, 100 + positions)


class TextRunner:
    """Returns the tokens of `text` for every row, immediately, and accepts the draft tokens that equal it.

    A `worker` also runs the step; its tokens are ignored. `seconds` is the CPU time of this class, and `critical_seconds`
    that of the engine and the worker from the call of `collect` to the end of the newest `forward`.
    """

    def __init__(self, worker: Runner | None = None) -> None:
        """Start without steps."""
        self.seconds = 0.0
        self.critical_seconds = 0.0
        self.num_draft_tokens = 0  # of the newest step
        self._collected_at = 0.0
        self._worker = worker
        self._results: dict[int, StepResult] = {}

    def forward(self, plan: StepPlan) -> None:
        """Store the result."""
        started_at = thread_time()
        self.num_draft_tokens = plan.num_draft_tokens
        parts: list[I32] = []
        first = 0
        for row, num_query in enumerate(plan.num_query_tokens.tolist()):
            end = int(plan.num_computed_tokens[row]) + num_query
            if row >= plan.num_decodes:
                parts.append(text(end, end + int(plan.wants_logits[row])))
            else:
                tokens = text(end + 1 - num_query, end + 1)
                if plan.draft_token_ids is not None:
                    drafts = plan.draft_token_ids[first : first + num_query - 1]
                    first += num_query - 1
                    num_right = int(np.argmin(np.append(drafts == tokens[:-1], False)))
                    tokens = tokens[: num_right + 1]
                parts.append(tokens)
        counts = np.asarray([len(part) for part in parts], np.int32)
        self._results[plan.step_id] = StepResult(plan.step_id, counts, np.concatenate(parts), None)
        seconds = thread_time() - started_at
        self.seconds += seconds
        if self._worker is not None:
            self._worker.forward(plan)
        self.critical_seconds = thread_time() - self._collected_at - seconds

    def sample(self, step_id: int, late: LateInputs | None) -> None:
        """Let the worker sample."""
        if self._worker is not None:
            self._worker.sample(step_id, late)

    def collect(self, step_id: int) -> StepResult:
        """Return the result."""
        self._collected_at = thread_time()
        if self._worker is not None:
            self._worker.collect(step_id)
        return self._results.pop(step_id)

    def close(self) -> None:
        """Close the worker."""
        if self._worker is not None:
            self._worker.close()


class FreeDepth(AdaptiveDepth):
    """An `AdaptiveDepth` for which all steps take the same time, so that drafts always pay off."""

    def finish_step(self, step: FinishedStep) -> None:
        """Record the step as one second long."""
        super().finish_step(step._replace(seconds=1.0, is_steady=True))


def paused_depth(max_num_seqs: int, max_drafts: int) -> AdaptiveDepth:
    """Return an `AdaptiveDepth` in a pause that does not end."""
    depth = AdaptiveDepth(max_num_seqs, max_drafts)
    depth.account.pause = 1 << 60
    return depth


def decoding(
    num_rows: int,
    context: int,
    num_steps: int,
    num_drafts: int = 0,
    *,
    drafter: str = "suffix",
    is_paused: bool = False,
    with_worker: bool = False,
) -> Engine:
    """Return an engine in which `num_rows` sequences decode."""
    num_new = (num_steps + SLACK) * (1 + num_drafts * (not is_paused))
    max_len = context + BLOCK_SIZE + num_new
    num_blocks = (num_rows + 1) * (max_len // BLOCK_SIZE + 2)
    kv = KVManager((FullAttention("full", 1, 1, 1),), BLOCK_SIZE, num_blocks)
    limits = SchedulerLimits(
        num_rows, max_len, 1 << 20, 1 << 20, 1 << 20, VOCAB_SIZE, max_drafts=num_drafts
    )
    worker = None
    if with_worker:
        from host_worker import captured_worker

        worker = captured_worker(num_rows, max_len, num_blocks * BLOCK_SIZE, num_drafts, VOCAB_SIZE)
    scheduler = Scheduler(limits, kv, POLICIES["fcfs"])
    if num_drafts:
        scheduler.use_drafts(
            HostDrafts(
                make_drafter(drafter, limits),
                drafter,
                paused_depth(num_rows, num_drafts)
                if is_paused
                else FreeDepth(num_rows, num_drafts),
                limits,
                scheduler.columns,
                scheduler.sequences,
            ),
            with_prompts=False,
        )
    runner = TextRunner(worker)
    engine = Engine(scheduler, runner)
    for i in range(num_rows):
        # A unique prompt, so that no prefix is shared.
        prompt = text(0, context + i % BLOCK_SIZE)
        prompt[0] = 200 + i
        stop = np.asarray([2], np.int32)
        engine.submit(request(i + 1, prompt, max_tokens=num_new, stop_token_ids=stop))
    while engine.scheduler.sequences.num_running < num_rows or len(
        engine.scheduler.columns.prefilling()
    ):
        engine.step()
    while num_drafts and not is_paused and not runner.num_draft_tokens:
        engine.step()  # an engine starts with a pause
    return engine


def make_drafter(name: str, limits: SchedulerLimits) -> Any:
    """Return a drafter of `tokenspeed-drafters`."""
    from tokenspeed_drafters.ngram import NgramDrafter
    from tokenspeed_drafters.suffix import SuffixDrafter

    factories: dict[str, Callable[[DrafterContext], Any]] = {
        "ngram": NgramDrafter,
        "suffix": SuffixDrafter,
    }
    return factories[name](
        DrafterContext(
            limits.vocab_size, limits.max_num_seqs, limits.max_model_len, limits.max_drafts, {}
        )
    )


def step_times(
    engine: Engine, num_steps: int, *, with_drafts: bool = False
) -> tuple[list[float], list[float]]:
    """Return the microseconds of each step, or of each with drafts, and those between its launch and the result before.

    A step includes packing its message to the API.
    """
    runner, times, critical = engine.runner, [], []
    assert isinstance(runner, TextRunner), "made by `decoding`"
    for _ in range(num_steps):
        runner.seconds = 0.0
        begin = thread_time()
        for outputs in engine.step():
            pack(outputs)
        seconds = thread_time() - begin - runner.seconds
        if runner.num_draft_tokens or not with_drafts:
            times.append(1e6 * seconds)
            critical.append(1e6 * runner.critical_seconds)
    return times, critical


def floor(engine: Engine, num_steps: int) -> float:
    """Return the median microseconds of packing the message of a step, of `num_steps` times."""
    messages, times = engine.step(), []
    for _ in range(num_steps):
        begin = thread_time()
        for outputs in messages:
            pack(outputs)
        times.append(1e6 * (thread_time() - begin))
    return statistics.median(times)


def main() -> None:
    """Measure every number of rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[1, 64, 256], help="numbers of sequences"
    )
    parser.add_argument("--context", type=int, default=1024, help="prompt tokens per sequence")
    parser.add_argument("--steps", type=int, default=2000, help="decode steps to measure")
    parser.add_argument(
        "--drafts", nargs="+", default=["0"], help=f"draft tokens per row, or {PAUSED}"
    )
    parser.add_argument(
        "--drafter", choices=("suffix", "ngram"), default="suffix", help="drafter for --drafts"
    )
    parser.add_argument("--worker", action="store_true", help="also run a worker on the CPU")
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    arguments = parser.parse_args()
    for num_rows in arguments.rows:
        for drafts in arguments.drafts:
            measure(arguments, num_rows, drafts)


def measure(arguments: argparse.Namespace, num_rows: int, drafts: str) -> None:
    """Measure one number of rows, and print a JSON line."""
    is_paused = drafts == PAUSED
    num_drafts = 4 if is_paused else int(drafts)
    engine = decoding(
        num_rows,
        arguments.context,
        arguments.steps,
        num_drafts,
        drafter=arguments.drafter,
        is_paused=is_paused,
        with_worker=arguments.worker,
    )
    with_drafts = num_drafts > 0 and not is_paused
    profiler = cProfile.Profile()
    if arguments.profile:
        profiler.enable()
    times, critical = step_times(engine, arguments.steps, with_drafts=with_drafts)
    profiler.disable()
    times.sort()
    median, least = statistics.median(times), floor(engine, arguments.steps)
    engine.close()
    print(
        json.dumps(
            {
                "rows": num_rows,
                "context": arguments.context,
                "drafts": drafts,
                "worker": arguments.worker,
                "median_us": round(median, 1),
                "p10_us": round(times[len(times) // 10], 1),
                "p99_us": round(times[-len(times) // 100], 1),
                "critical_us": round(statistics.median(critical), 1) if with_drafts else None,
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
