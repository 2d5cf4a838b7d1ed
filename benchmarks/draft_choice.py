"""Replay known answers through engines with a drafter and a simulated device, and show when they draft.

The scheduler, the drafter and the worker of `host_step.py --worker` run on the CPU. Their CPU time moves a virtual clock,
so that other programs disturb the result less. The device is simulated: a step takes `--device-us`, and `--draft-us` more
for each draft token, while the host works on. Each launch takes the host `--launch-us` more. The items of the demo's tasks
are sent in batches, one item for each of `--users`, and each engine keeps its state between tasks.

The engine `chosen` decides when to draft. `all` verifies all proposed tokens, `paused` has a drafter and never calls it,
and `none` has no drafter. `speedup` is relative to the first engine; a second `none` shows the error. `pauses` are the
causes of pauses. Example:

    OMP_NUM_THREADS=1 python benchmarks/draft_choice.py
    OMP_NUM_THREADS=1 python benchmarks/draft_choice.py --tasks copy --device-us 150 --engines none,chosen
    OMP_NUM_THREADS=1 python benchmarks/draft_choice.py --users 32 --items 960 --drafts 8 --engines none,none,chosen
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import deque
from collections.abc import Sequence
from time import thread_time
from typing import Any
from unittest.mock import patch

import numpy as np
from drafters import Answer, answers_of
from host_step import make_drafter
from host_worker import captured_worker
from tokenspeed_bench.result import machine
from tokenspeed_testing.requests import request

from tokenspeed_core.api.cache_groups import FullAttention
from tokenspeed_core.api.step import I32, LateInputs, Runner, StepPlan, StepResult
from tokenspeed_core.engine.engine import Engine
from tokenspeed_core.engine.wire import pack
from tokenspeed_core.kv_cache.manager import KVManager
from tokenspeed_core.scheduler import drafts as drafts_module
from tokenspeed_core.scheduler import prefill_budget
from tokenspeed_core.scheduler.draft_depth import AdaptiveDepth
from tokenspeed_core.scheduler.drafts import FinishedStep, HostDrafts
from tokenspeed_core.scheduler.limits import SchedulerLimits
from tokenspeed_core.scheduler.policy import POLICIES
from tokenspeed_core.scheduler.scheduler import Scheduler

BLOCK_SIZE = 16
VOCAB_SIZE = 100_000
GROUP = 8  # items of a task that an engine answers in turn
PROMPT_US = 500  # of a step with prompts, on the device


class Clock:
    """CPU time of this thread, and the time that the host waited for the simulated device."""

    def __init__(self) -> None:
        """Start at the CPU time."""
        self.waited = 0.0

    def __call__(self) -> float:
        """Return the seconds."""
        return thread_time() + self.waited


class SimulatedDevice:
    """Runs steps on a virtual clock and returns the tokens of known answers. A worker does the host's part."""

    def __init__(self, clock: Clock, worker: Runner, arguments: argparse.Namespace) -> None:
        """Start idle."""
        self.tokens: dict[int, I32] = {}  # of each sequence, prompt included
        self.sequence_ids = np.zeros(0, np.int64)  # of each slot
        self._clock = clock
        self._worker = worker
        self._seconds = 1e-6 * arguments.device_us
        self._per_draft = 1e-6 * arguments.draft_us
        self._launch_seconds = 1e-6 * arguments.launch_us
        self._end = 0.0
        self._results: deque[tuple[float, StepResult]] = deque()

    def forward(self, plan: StepPlan) -> None:
        """Launch a step."""
        clock = self._clock
        started_at = clock()
        is_prompt = bool(len(plan.token_ids))
        result = self._result(plan)
        clock.waited -= clock() - started_at
        self._worker.forward(plan)
        self._worker.sample(plan.step_id, None)
        seconds = self._seconds + self._per_draft * plan.num_draft_tokens
        if is_prompt:  # computed eagerly
            clock.waited -= clock() - started_at
            seconds = 1e-6 * PROMPT_US
        clock.waited += self._launch_seconds
        self._end = max(self._end, clock()) + seconds
        self._results.append((self._end, result))

    def sample(self, step_id: int, late: LateInputs | None) -> None:
        """Do nothing: `forward` sampled."""

    def collect(self, step_id: int) -> StepResult:
        """Wait for the oldest step."""
        self._worker.collect(step_id)
        end, result = self._results.popleft()
        self._clock.waited += max(0.0, end - self._clock())
        return result

    def close(self) -> None:
        """Close the worker."""
        self._worker.close()

    def _result(self, plan: StepPlan) -> StepResult:
        """Accept the draft tokens that equal the answers."""
        counts: list[int] = []
        parts: list[I32] = []
        num_drafts = 0
        for row, num_query in enumerate(plan.num_query_tokens.tolist()):
            answer = self.tokens[self.sequence_ids.item(plan.slots.item(row))]
            # All earlier steps of a step with drafts were collected, so its positions are exact.
            end = plan.num_computed_tokens.item(row) + num_query
            num_new = int(plan.wants_logits[row])
            if plan.draft_token_ids is not None and row < plan.num_decodes:
                end -= num_query - 1
                drafts = plan.draft_token_ids[num_drafts : num_drafts + num_query - 1]
                num_drafts += num_query - 1
                expected = answer[end : end + len(drafts)]
                right = drafts[: len(expected)] == expected
                num_new += int(np.argmin(np.append(right, False)))
            # A plain step may follow the last token of an answer before the host knows that it is the last.
            counts.append(num_new)
            parts.append(np.append(answer[end : end + num_new], np.zeros(num_new, np.int32)))
            parts[-1] = parts[-1][:num_new].astype(np.int32)
        return StepResult(plan.step_id, np.array(counts, np.int32), np.concatenate(parts), None)


class RecordingDepth(AdaptiveDepth):
    """An `AdaptiveDepth` that keeps its measured steps of decodes, and the causes of its pauses."""

    def __init__(self, max_num_seqs: int, max_drafts: int) -> None:
        """Start without steps."""
        super().__init__(max_num_seqs, max_drafts)
        self.steps: list[FinishedStep] = []
        self.pauses: list[str] = []

    def finish_step(self, step: FinishedStep) -> None:
        """Record the step."""
        before, pause = self.account.balance, self.account.pause
        is_called, was_called = self._is_drafting, self._was_drafting
        is_early, spent = self._has_proposed_early, self._spent + self._spent_before
        super().finish_step(step)
        if not step.num_chunk_tokens:
            self.steps.append(step)
        if self.account.pause > pause:
            self.pauses.append(
                f"pause of {self.account.pause} steps, budget {before:.2f} to {self.budget:.2f}: "
                f"{step.num_tokens - step.num_rows} draft tokens, {step.num_accepted} accepted, "
                f"{1e6 * step.seconds:.0f} us, plain {1e6 * self.cost.of(step.num_rows).plain:.0f} us; "
                f"{1e6 * spent:.0f} us to begin, end and propose early; called {is_called}, "
                f"called before {was_called}, proposed early {is_early}"
            )


class AllDrafts(RecordingDepth):
    """Verifies all proposed tokens in every step."""

    def finish_step(self, step: FinishedStep) -> None:
        """Record the step. The next one is recorded too."""
        super().finish_step(step)
        self.num_unmeasured = 0

    def max_drafts(self, num_rows: int) -> int:
        """Return the maximum."""
        return self._max_drafts

    @property
    def is_paused(self) -> bool:
        """Return False."""
        return False

    def max_seconds(self, num_rows: int) -> float:
        """Return no limit."""
        return float("inf")

    def are_worth_waiting(self, slots: Any, counts: I32, *rest: Any) -> bool:
        """Return whether there are any."""
        return bool(np.count_nonzero(counts))

    def choose(self, slots: Any, counts: I32, *rest: Any) -> I32:
        """Return the counts."""
        self._is_drafting = True
        return counts


class PausedDepth(RecordingDepth):
    """Never drafts."""

    def __init__(self, max_num_seqs: int, max_drafts: int) -> None:
        """Start with a pause that does not end."""
        super().__init__(max_num_seqs, max_drafts)
        self.account.pause = 1 << 60


DEPTHS = {"none": None, "paused": PausedDepth, "all": AllDrafts, "chosen": RecordingDepth}


class Replay:
    """An engine that answers with known tokens."""

    def __init__(
        self, name: str, arguments: argparse.Namespace, max_len: int, worker: Runner
    ) -> None:
        """`name` is one of `DEPTHS`."""
        self.name = name
        kind = DEPTHS[name]
        max_drafts = arguments.drafts if kind else 0
        num_users = arguments.users
        num_blocks = num_tokens(num_users, max_len) // BLOCK_SIZE
        kv = KVManager((FullAttention("full", 1, 1, 1),), BLOCK_SIZE, num_blocks)
        limits = SchedulerLimits(
            num_users, max_len, 1 << 20, 1 << 20, 1 << 20, VOCAB_SIZE, max_drafts=max_drafts
        )
        self.clock = Clock()
        self.device = SimulatedDevice(self.clock, worker, arguments)
        scheduler = Scheduler(limits, kv, POLICIES["fcfs"])
        self.device.sequence_ids = scheduler.columns.sequence_id
        self.depth: RecordingDepth | None = None
        if kind:
            self.depth = kind(num_users, max_drafts)
            drafter = make_drafter(arguments.drafter, limits)
            scheduler.use_drafts(
                HostDrafts(
                    drafter,
                    arguments.drafter,
                    self.depth,
                    limits,
                    scheduler.columns,
                    scheduler.sequences,
                ),
                with_prompts=False,
            )
        self.engine = Engine(scheduler, self.device)
        self.num_requests = 0

    def run(self, answers: Sequence[Answer]) -> float:
        """Return the virtual seconds of some answers, which are requested together."""
        with (
            patch.object(prefill_budget, "perf_counter", self.clock),
            patch.object(drafts_module, "perf_counter", self.clock),
        ):
            found: dict[int, list[int]] = {}
            expected: dict[int, list[int]] = {}
            for each in answers:
                self.num_requests += 1
                number = self.num_requests
                found[number], expected[number] = [], each.answer
                self.device.tokens[number] = np.asarray([*each.prompt, *each.answer], np.int32)
                stop = np.asarray(each.answer[-1:], np.int32)
                self.engine.submit(
                    request(number, each.prompt, max_tokens=len(each.answer), stop_token_ids=stop)
                )
            started_at = self.clock()
            while self.engine.has_work:
                for outputs in self.engine.step():
                    pack(outputs)
                    start = 0
                    for number, count in zip(
                        outputs.sequence_ids.tolist(), outputs.num_tokens.tolist(), strict=True
                    ):
                        found[number] += outputs.token_ids[start : start + count].tolist()
                        start += count
            seconds = self.clock() - started_at
            assert found == expected, "draft tokens change no answer"
            self.engine.reset_prefix_cache()
            self.device.tokens.clear()
        return seconds


def num_tokens(num_users: int, max_len: int) -> int:
    """Return the tokens of a KV cache with room for all users."""
    return (num_users + 1) * (max_len // BLOCK_SIZE + 2) * BLOCK_SIZE


def summary(steps: Sequence[FinishedStep]) -> dict[str, Any]:
    """Return the figures of measured steps."""
    drafted = [step for step in steps if step.num_tokens > step.num_rows]
    plain = [step for step in steps if step.num_tokens == step.num_rows and step.is_steady]
    num_accepted = sum(step.num_accepted for step in drafted)
    found: dict[str, Any] = {
        "drafted": len(drafted),
        "accepted_per_drafted": round(num_accepted / max(1, len(drafted)), 2),
    }
    for kind, of_kind in (("plain", plain), ("drafted", drafted)):
        times = [round(1e6 * step.seconds, 1) for step in of_kind]
        if times:
            found |= {
                f"{kind}_first_us": times[0],
                f"{kind}_median_us": round(statistics.median(times), 1),
                f"{kind}_p99_us": sorted(times)[-1 - len(times) // 100],
            }
    return found


def replays_of(arguments: argparse.Namespace, max_len: int) -> list[Replay]:
    """Return the engines to compare."""
    num_users = arguments.users
    replays = []
    for name in arguments.engines.split(","):
        max_drafts = arguments.drafts * (name != "none")
        worker = captured_worker(
            num_users, max_len, num_tokens(num_users, max_len), max_drafts, VOCAB_SIZE
        )
        replays.append(Replay(name, arguments, max_len, worker))
    return replays


def measure(
    replays: Sequence[Replay], task: str, answers: Sequence[Answer], num_users: int
) -> None:
    """Replay a task with all engines in alternation, and print a JSON line for each."""
    num_before = [each.engine.num_steps for each in replays]
    seconds = [0.0] * len(replays)
    for each in replays:
        if each.depth is not None:
            each.depth.steps.clear()
            each.depth.pauses.clear()
    group = max(GROUP // num_users, 1) * num_users
    for start in range(0, len(answers), group):
        for i, each in enumerate(replays):
            for first in range(start, min(start + group, len(answers)), num_users):
                seconds[i] += each.run(answers[first : first + num_users])
    num_new = sum(len(each.answer) for each in answers)
    for each, before, spent in zip(replays, num_before, seconds, strict=True):
        row: dict[str, Any] = {
            "task": task,
            "engine": each.name,
            "us_per_token": round(1e6 * spent / num_new, 1),
            "speedup": round(seconds[0] / spent, 3),
            "steps": each.engine.num_steps - before,
        }
        if each.depth is not None:
            row |= summary(each.depth.steps) | {"pauses": each.depth.pauses}
        print(json.dumps(row), flush=True)


def main() -> None:
    """Replay, and print a JSON line for each task and engine."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tasks", default="edit,copy,tool_call,sum_three_digits", help="tasks to replay"
    )
    parser.add_argument("--items", type=int, default=96, help="items of a task")
    parser.add_argument("--users", type=int, default=1, help="items that are sent together")
    parser.add_argument(
        "--engines",
        default="none,none,all,chosen",
        help=f"of {', '.join(DEPTHS)}; none is the baseline",
    )
    parser.add_argument("--drafter", choices=("suffix", "ngram"), default="suffix", help="drafter")
    parser.add_argument("--drafts", type=int, default=15, help="maximum draft tokens of a step")
    parser.add_argument("--device-us", type=float, default=100, help="time of a step on the device")
    parser.add_argument(
        "--draft-us", type=float, default=1, help="time of each draft token on the device"
    )
    parser.add_argument(
        "--launch-us", type=float, default=40, help="time of launches and copies on the host"
    )
    arguments = parser.parse_args()
    answers = {task: answers_of(task, arguments.items) for task in arguments.tasks.split(",")}
    longest = max(len(each.prompt) + len(each.answer) for of in answers.values() for each in of)
    replays = replays_of(arguments, BLOCK_SIZE + longest)
    print(json.dumps({"machine": machine(), **vars(arguments)}))
    for task, of_task in answers.items():
        measure(replays, task, of_task, arguments.users)


if __name__ == "__main__":
    main()
