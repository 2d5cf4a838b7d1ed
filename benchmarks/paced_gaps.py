"""Simulate the scheduler and its prefill budget in virtual time; print token gaps, first tokens and tokens/s.

    python benchmarks/paced_gaps.py --users 64 256 --requests 512 2048 --min-ms 12 9

A step takes `--step-us`, plus `--row-us` for each decode and `--token-us` for each prompt token. The defaults are
those of qwen3-0.6b on an H200. The time of the API and of clients is not simulated. Lengths vary by up to 50 %.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass, field

import numpy as np
from tokenspeed_testing.requests import request

from tokenspeed_core.api.cache_groups import FullAttention
from tokenspeed_core.api.step import LateInputs, StepPlan, StepResult
from tokenspeed_core.engine.engine import Engine
from tokenspeed_core.engine.messages import Submit
from tokenspeed_core.kv_cache.manager import KVManager
from tokenspeed_core.scheduler import prefill_budget
from tokenspeed_core.scheduler.limits import SchedulerLimits
from tokenspeed_core.scheduler.policy import POLICIES
from tokenspeed_core.scheduler.scheduler import Scheduler

LAUNCH_SECONDS = 150e-6  # before each step
COLLECT_SECONDS = 100e-6  # after each step
CLIENT_SECONDS = 1e-3  # from an answer to the user's next request
IN_LEN = 256
OUT_LEN = 128
VOCAB_SIZE = 1000


@dataclass
class SimulatedRunner:
    """A runner with a simulated time per step: `step + row * decodes + token * prompt tokens` seconds."""

    step: float
    row: float
    token: float
    now: float = 0.0
    free: float = 0.0
    flying: dict[int, tuple[float, StepPlan]] = field(default_factory=dict)

    def forward(self, plan: StepPlan) -> None:
        """Launch a step after the launched ones."""
        seconds = self.step + self.row * plan.num_decodes + self.token * len(plan.token_ids)
        self.free = max(self.now + LAUNCH_SECONDS, self.free) + seconds
        self.flying[plan.step_id] = self.free, plan

    def sample(self, step_id: int, late: LateInputs | None) -> None:
        """Do nothing."""

    def collect(self, step_id: int) -> StepResult:
        """Wait for a step."""
        end, plan = self.flying.pop(step_id)
        self.now = max(self.now, end) + COLLECT_SECONDS
        counts = plan.wants_logits.astype(np.int32)
        return StepResult(step_id, counts, np.full(int(counts.sum()), 7, np.int32), None)

    def close(self) -> None:
        """Do nothing."""


def random_request(request_id: int, rng: random.Random) -> Submit:
    """Return a request with random token ids."""
    num_prompt, num_output = (int(length * rng.uniform(0.5, 1.5)) for length in (IN_LEN, OUT_LEN))
    prompt = [rng.randrange(VOCAB_SIZE) for _ in range(num_prompt)]
    return request(request_id, prompt, max_tokens=num_output)


def simulate(device: SimulatedRunner, num_users: int, num_requests: int) -> str:
    """Simulate users that each send one request after another; return the figures."""
    prefill_budget.perf_counter = lambda: device.now  # type: ignore[attr-defined]
    limits = SchedulerLimits(max(256, num_users), 40960, 8192, 8192, num_requests, VOCAB_SIZE)
    kv = KVManager((FullAttention("full", 1, 1, 1),), 16, 200_000, prefix_caching=True)
    scheduler = Scheduler(limits, kv, POLICIES["fcfs"])
    engine, rng = Engine(scheduler, device, depth=2), random.Random(0)
    asked: list[float] = [0.0] * num_users
    born: dict[int, float] = {}
    last: dict[int, float] = {}
    gaps: list[float] = []
    firsts: list[float] = []
    while engine.has_work or (asked and len(born) < num_requests):
        while (
            asked and len(born) < num_requests and (asked[0] <= device.now or not engine.has_work)
        ):
            device.now = max(device.now, asked.pop(0))
            born[len(born) + 1] = device.now
            assert scheduler.submit(random_request(len(born), rng)) is None
        for outputs in engine.step():
            for name, count, finish in zip(
                outputs.sequence_ids, outputs.num_tokens, outputs.finish, strict=True
            ):
                if count:
                    (gaps if name in last else firsts).append(
                        device.now - last.get(name, born[name])
                    )
                    last[name] = device.now
                if finish:
                    asked.append(device.now + CLIENT_SECONDS)
    rate = (len(gaps) + len(firsts)) / device.now
    gap, first = (
        np.percentile(np.array(each) * 1e3, (50, 99, 100)).round(1) for each in (gaps, firsts)
    )
    return (
        f"{rate:.0f} tokens/s; between tokens p50 {gap[0]}, p99 {gap[1]}, max {gap[2]} ms; "
        f"first token p50 {first[0]}, p99 {first[1]} ms"
    )


def main() -> None:
    """Simulate each number of users with each bound."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--users", type=int, nargs="+", default=[64, 256], help="numbers of concurrent users"
    )
    parser.add_argument(
        "--requests",
        type=int,
        nargs="+",
        default=[512, 2048],
        help="number of requests, one for each of --users",
    )
    parser.add_argument(
        "--min-ms",
        type=float,
        nargs="+",
        default=[prefill_budget.MIN_SECONDS * 1e3],
        help="lower bounds of a mixed step",
    )
    parser.add_argument("--step-us", type=float, default=760, help="µs per step")
    parser.add_argument("--row-us", type=float, default=11, help="µs per decode")
    parser.add_argument("--token-us", type=float, default=3.3, help="µs per prompt token")
    given = parser.parse_args()
    for users, requests in zip(given.users, given.requests, strict=True):
        for min_ms in given.min_ms:
            prefill_budget.MIN_SECONDS = min_ms / 1e3
            device = SimulatedRunner(given.step_us / 1e6, given.row_us / 1e6, given.token_us / 1e6)
            print(
                f"{users} users, mixed steps of at least {min_ms:g} ms: {simulate(device, users, requests)}",
                flush=True,
            )


if __name__ == "__main__":
    main()
