"""Drafts that do not pay off hardly slow an engine down. The time is virtual."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
from tokenspeed_testing.requests import request

from tokenspeed_core.api.cache_groups import FullAttention
from tokenspeed_core.api.drafters import Drafts
from tokenspeed_core.api.step import I32, LateInputs, StepPlan, StepResult
from tokenspeed_core.engine.engine import Engine
from tokenspeed_core.kv_cache.manager import KVManager
from tokenspeed_core.scheduler import drafts as drafts_module
from tokenspeed_core.scheduler import prefill_budget
from tokenspeed_core.scheduler.draft_depth import AdaptiveDepth
from tokenspeed_core.scheduler.drafts import DraftSource, HostDrafts
from tokenspeed_core.scheduler.limits import SchedulerLimits
from tokenspeed_core.scheduler.model_drafts import ModelDrafts
from tokenspeed_core.scheduler.policy import POLICIES
from tokenspeed_core.scheduler.scheduler import Scheduler

MAX_DRAFTS = 8
VOCAB_SIZE = 100
STOP = 1


@dataclass
class Costs:
    """Times of the parts of a step; the unit is the time to plan and launch a step."""

    host: float = 1.0  # to plan and launch a step
    admit: float = 0.0  # to plan a step that admits sequences, in addition
    device: float = 0.9
    propose: float = 0.0  # on the host, in addition
    verify: float = 0.0  # on the device, for each draft token
    drafted: float = 0.0  # on the host, to plan and launch a step with draft tokens, in addition
    begin: float = 0.0
    end: float = 0.0
    # Of a draft model, on the device after a step: its pass over a step with prompts or without, and each further pass.
    follow_prompts: float = 0.0
    follow: float = 0.0
    draft: float = 0.0
    is_model: bool = False


class Clock:
    """A virtual clock."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class TimedRunner:
    """Advances the clock like a host and a device that work in parallel.

    A draft token is right with probability `acceptance`. Each sequence's output has a stop token at the place `stops_at`,
    if that is not 0.
    """

    def __init__(
        self, clock: Clock, costs: Costs, acceptance: float, seed: int, stops_at: int = 0
    ) -> None:
        self.stops_at = stops_at
        self.num_made: dict[int, int] = {}  # tokens of each slot
        self.clock, self.costs, self.acceptance = clock, costs, acceptance
        self.random = np.random.default_rng(seed)
        self.device_end = 0.0
        self.num_followed = 0
        self.results: deque[tuple[float, StepResult]] = deque()

    def forward(self, plan: StepPlan) -> None:
        costs = self.costs
        self.clock.now += costs.host + costs.drafted * (plan.num_draft_tokens > 0)
        self.clock.now += costs.admit * (plan.slot_inits is not None)
        seconds = costs.device + costs.verify * plan.num_draft_tokens
        self.device_end = max(self.device_end, self.clock.now) + seconds
        num_new = plan.wants_logits.astype(np.int32)
        for row in range(plan.num_decodes):
            while (
                num_new[row] < plan.num_query_tokens[row] and self.random.random() < self.acceptance
            ):
                num_new[row] += 1
        tokens = self.tokens(plan, num_new)
        self.results.append((self.device_end, StepResult(plan.step_id, num_new, tokens, None)))
        if plan.next_drafts is not None:
            self.num_followed += 1
            self.device_end += costs.follow_prompts if len(plan.token_ids) else costs.follow
            self.device_end += costs.draft * max(0, plan.next_drafts.num_drafts - 1)

    def tokens(self, plan: StepPlan, num_new: I32) -> I32:
        """Return the new tokens of all rows."""
        if plan.slot_inits is not None:
            self.num_made |= dict.fromkeys(plan.slot_inits.slots.tolist(), 0)
        ids: list[int] = []
        for slot, num in zip(plan.slots.tolist(), num_new.tolist(), strict=True):
            first, self.num_made[slot] = self.num_made[slot] + 1, self.num_made[slot] + num
            ids += [STOP * (place == self.stops_at) for place in range(first, first + num)]
        return np.asarray(ids, np.int32)

    def sample(self, step_id: int, late: LateInputs | None) -> None:
        return None

    def collect(self, step_id: int) -> StepResult:
        end, result = self.results.popleft()
        self.clock.now = max(self.clock.now, end)
        return result

    def close(self) -> None:
        return None


class TimedDrafter:
    """Proposes as many tokens as it may."""

    def __init__(self, clock: Clock, costs: Costs) -> None:
        self.clock, self.costs = clock, costs

    def begin(self, slot: int, token_ids: I32, num_prompt_tokens: int, tenant: str) -> None:
        self.clock.now += self.costs.begin

    def extend(self, slots: I32, counts: I32, token_ids: I32) -> None:
        return None

    def propose(self, slots: I32, max_drafts: I32) -> Drafts:
        self.clock.now += self.costs.propose
        return Drafts(max_drafts, np.zeros(int(max_drafts.sum()), np.int32))

    def end(self, slot: int) -> None:
        self.clock.now += self.costs.end


def seconds_of(
    monkeypatch: pytest.MonkeyPatch,
    costs: Costs,
    acceptances: list[float],
    *,
    drafting: bool,
    num_users: int = 1,
    num_sequences: int = 20,
    num_tokens: int = 60,
    spread: int = 0,
    stops: bool = False,
) -> list[float]:
    """Return the virtual time in which an engine generates some sequences, for each acceptance in turn.

    A sequence has `num_tokens` to `num_tokens + spread` tokens. With `stops`, a stop token ends it.
    """
    clock = Clock()
    monkeypatch.setattr(prefill_budget, "perf_counter", clock)
    monkeypatch.setattr(drafts_module, "perf_counter", clock)
    limits = SchedulerLimits(
        num_users, 512, 256, 256, 10_000, VOCAB_SIZE, max_drafts=MAX_DRAFTS * drafting
    )
    scheduler = Scheduler(
        limits, KVManager((FullAttention("full", 1, 1, 1),), 16, 32 * num_users), POLICIES["fcfs"]
    )
    if drafting:
        depth = AdaptiveDepth(num_users, MAX_DRAFTS, is_model=costs.is_model)
        columns, sequences = scheduler.columns, scheduler.sequences
        drafts: DraftSource = ModelDrafts(depth, limits, columns)
        if not costs.is_model:
            drafter = TimedDrafter(clock, costs)
            drafts = HostDrafts(drafter, "timed", depth, limits, columns, sequences)
        scheduler.use_drafts(drafts, with_prompts=False)
    runner = TimedRunner(clock, costs, 0.0, 0, num_tokens * stops)
    engine, seconds = Engine(scheduler, runner), []
    for acceptance in acceptances:
        runner.acceptance, started_at = acceptance, clock.now
        for i in range(num_sequences):
            number = len(seconds) * num_sequences + i
            length = number * 37 % (spread + 1)
            limit = 400 if stops else num_tokens + length
            stop = np.asarray([STOP] * stops, np.int32)
            prompt = [number % 90 + 1] * 20
            engine.submit(request(number, prompt, max_tokens=limit, stop_token_ids=stop))
        while engine.has_work:
            engine.step()
        seconds.append(clock.now - started_at)
    return seconds


def speedups(
    monkeypatch: pytest.MonkeyPatch,
    costs: Costs,
    acceptances: list[float],
    num_users: int = 1,
    num_sequences: int = 20,
    num_tokens: int = 60,
    spread: int = 0,
    stops: bool = False,
) -> list[float]:
    """Return the ratio of the times without and with drafts, for each acceptance."""
    drafting = seconds_of(
        monkeypatch,
        costs,
        acceptances,
        drafting=True,
        num_users=num_users,
        num_sequences=num_sequences,
        num_tokens=num_tokens,
        spread=spread,
        stops=stops,
    )
    plain = seconds_without_drafts(
        costs.host,
        costs.admit,
        costs.device,
        len(acceptances),
        num_users,
        num_sequences,
        num_tokens,
        spread,
        stops,
    )
    return [a / b for a, b in zip(plain, drafting, strict=True)]


@cache
def seconds_without_drafts(
    host: float,
    admit: float,
    device: float,
    num_acceptances: int,
    num_users: int,
    num_sequences: int,
    num_tokens: int,
    spread: int,
    stops: bool,
) -> list[float]:
    """Return the times without drafts, which depend on no other costs and on no acceptance."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        return seconds_of(
            monkeypatch,
            Costs(host, admit, device),
            [0.0] * num_acceptances,
            drafting=False,
            num_users=num_users,
            num_sequences=num_sequences,
            num_tokens=num_tokens,
            spread=spread,
            stops=stops,
        )


SIX_TIMES = Costs(propose=4.1)  # 4.1 + 1.0 + 0.9 without overlap; 1.0 without drafts


@pytest.mark.parametrize("costs", [SIX_TIMES, Costs(propose=4.1, begin=2.0, end=1.0)])
@pytest.mark.parametrize(("num_users", "num_sequences"), [(1, 20), (8, 160)])
@pytest.mark.parametrize("acceptance", [0.0, 0.6, 0.9])
def test_costly_drafts_lose_less_than_two_percent(
    monkeypatch: pytest.MonkeyPatch,
    costs: Costs,
    num_users: int,
    num_sequences: int,
    acceptance: float,
) -> None:
    (found,) = speedups(monkeypatch, costs, [acceptance], num_users, num_sequences)
    assert found >= 0.98


@pytest.mark.parametrize("num_users", [pytest.param(1, marks=pytest.mark.release), 4])
def test_short_answers_pay_for_the_end_of_their_sequences(
    monkeypatch: pytest.MonkeyPatch, num_users: int
) -> None:
    costs = Costs(host=0.3, device=1.0, propose=0.1, end=1.3)
    (found,) = speedups(monkeypatch, costs, [0.99], num_users, 1500, num_tokens=3)
    assert found >= 0.98


@pytest.mark.parametrize(("num_users", "num_sequences", "expected"), [(1, 20, 2.7), (8, 160, 1.5)])
def test_cheap_drafts_keep_their_gain(
    monkeypatch: pytest.MonkeyPatch, num_users: int, num_sequences: int, expected: float
) -> None:
    costs = Costs(host=0.3, device=1.0, verify=0.2 / MAX_DRAFTS)
    (found,) = speedups(monkeypatch, costs, [0.9], num_users, 2 * num_sequences)
    assert found >= expected


@pytest.mark.parametrize(
    "costs",
    [
        SIX_TIMES,
        Costs(host=0.3, verify=0.6),
        pytest.param(Costs(host=0.8, propose=0.3, begin=0.5), marks=pytest.mark.release),
    ],
)
def test_later_requests_do_not_spend_earlier_savings(
    monkeypatch: pytest.MonkeyPatch, costs: Costs
) -> None:
    found = speedups(monkeypatch, costs, [0.97, 0.6, 0.3])
    assert found[0] >= 0.98
    assert min(found[1:]) >= 0.98


@pytest.mark.parametrize("num_users", [1, 8])
@pytest.mark.parametrize(("num_tokens", "spread"), [(3, 0), (10, 30)])
@pytest.mark.parametrize("follow_prompts", [0.3, 4.0])
@pytest.mark.parametrize("acceptance", [pytest.param(0.0, marks=pytest.mark.release), 0.6])
def test_costly_draft_model_loses_less_than_two_percent(
    monkeypatch: pytest.MonkeyPatch,
    num_users: int,
    num_tokens: int,
    spread: int,
    follow_prompts: float,
    acceptance: float,
) -> None:
    costs = Costs(
        host=0.3,
        device=1.0,
        verify=0.1,
        follow_prompts=follow_prompts,
        follow=0.3,
        draft=0.3,
        is_model=True,
    )
    (found,) = speedups(
        monkeypatch, costs, [acceptance], num_users, 40 * num_users, num_tokens, spread
    )
    assert found >= 0.98


@pytest.mark.parametrize(
    ("num_users", "spread"), [(4, 1), pytest.param(8, 2, marks=pytest.mark.release)]
)
def test_draft_model_without_measured_plain_steps_costs_little(
    monkeypatch: pytest.MonkeyPatch, num_users: int, spread: int
) -> None:
    """With short answers, no plain step has plain ones before and after it."""
    costs = Costs(
        host=0.3, device=1.0, verify=0.1, follow_prompts=4.0, follow=0.3, draft=0.3, is_model=True
    )
    (found,) = speedups(
        monkeypatch, costs, [0.9], num_users, 200 * num_users, num_tokens=3, spread=spread
    )
    assert found >= 0.98


CHEAP_MODEL = Costs(
    host=0.3,
    device=1.0,
    verify=0.02,
    follow_prompts=0.2,
    follow=0.05,
    draft=0.05,
    is_model=True,
)


@pytest.mark.parametrize(("num_users", "expected"), [(1, 2.0), (8, 1.15)])
def test_cheap_draft_model_keeps_its_gain(
    monkeypatch: pytest.MonkeyPatch, num_users: int, expected: float
) -> None:
    costs = CHEAP_MODEL
    (found,) = speedups(
        monkeypatch, costs, [0.9], num_users, 40 * num_users, num_tokens=10, spread=30
    )
    assert found >= expected


@pytest.mark.parametrize("num_users", [8, pytest.param(32, marks=pytest.mark.release)])
def test_draft_model_that_delays_prompts_costs_little(
    monkeypatch: pytest.MonkeyPatch, num_users: int
) -> None:
    """Steps with prompts take 18 times as long if the model follows. Each pause ends with one of them."""
    costs = replace(CHEAP_MODEL, follow_prompts=17.0)
    found = speedups(
        monkeypatch, costs, [0.8] * 12, num_users, 12 * num_users, num_tokens=15, spread=20
    )
    assert sum(found) / len(found) >= 0.985
    assert min(found) >= 0.94


def test_admission_is_not_charged_to_a_draft_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model drafts after the prompt of a sequence. The step before it takes as long as the admission."""
    costs = replace(CHEAP_MODEL, admit=4.0)
    (found,) = speedups(monkeypatch, costs, [0.9], num_sequences=40, num_tokens=25, stops=True)
    assert found >= 1.7


@pytest.mark.parametrize("is_model", [False, True])
@pytest.mark.parametrize("num_users", [1, 4])
@pytest.mark.parametrize(
    "num_tokens",
    [
        pytest.param(2, marks=pytest.mark.release),
        4,
        pytest.param(20, marks=pytest.mark.release),
    ],
)
def test_tokens_after_a_stop_token_save_nothing(
    monkeypatch: pytest.MonkeyPatch, is_model: bool, num_users: int, num_tokens: int
) -> None:
    costs = Costs(
        host=0.3, device=1.0, propose=0.4, verify=0.1, follow=0.1, draft=0.1, is_model=is_model
    )
    (found,) = speedups(
        monkeypatch, costs, [0.9], num_users, 200 * num_users, num_tokens, stops=True
    )
    assert found >= 0.98
