"""The prefill budget: prompt tokens per step, from measured step times."""

from __future__ import annotations

import pytest
from engine_world import World
from tokenspeed_testing.requests import request

from tokenspeed_core.api.step import StepPlan
from tokenspeed_core.scheduler import prefill_budget
from tokenspeed_core.scheduler.prefill_budget import (
    FIRST_CHUNK,
    MAX_ANY_SECONDS,
    MIN_CHUNK,
    PrefillBudget,
)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that only the test advances."""
    now = [100.0]
    monkeypatch.setattr(prefill_budget, "perf_counter", lambda: now[0])
    return now


def test_first_step_is_small(clock: list[float]) -> None:
    assert PrefillBudget(8192).max_prefill_tokens(has_decodes=False) == FIRST_CHUNK
    assert PrefillBudget(64).max_prefill_tokens(has_decodes=False) == 64
    small = PrefillBudget(8192)
    small.start_after_idle()
    clock[0] += 1
    small.finish_step(8, 8)  # too small to be measured
    assert small.max_prefill_tokens(has_decodes=True) == FIRST_CHUNK


def steps(
    budget: PrefillBudget, clock: list[float], num: int, seconds: float, decodes: int, prompt: int
) -> None:
    """Finish `num` equal steps."""
    for _ in range(num):
        clock[0] += seconds
        budget.finish_step(decodes + prompt, prompt)


@pytest.mark.parametrize(
    ("microseconds_per_token", "expected"),
    [
        (1000.0, MIN_CHUNK),
        (24.0, 375),
        (2.0, 4500),
        (0.1, 8192),
    ],
)
def test_chunk_with_unknown_decode_cost_fits_the_shortest_limit(
    clock: list[float],
    microseconds_per_token: float,
    expected: int,
) -> None:
    budget = PrefillBudget(8192)
    budget.start_after_idle()
    steps(budget, clock, 1, 4096 * microseconds_per_token * 1e-6, 0, 4096)
    assert budget.max_prefill_tokens(has_decodes=True) == pytest.approx(expected, abs=1)
    alone = min(8192, max(MIN_CHUNK, MAX_ANY_SECONDS / (microseconds_per_token * 1e-6)))
    assert budget.max_prefill_tokens(has_decodes=False) == pytest.approx(alone, abs=1)


@pytest.mark.parametrize(
    ("decode_ms", "step_ms"), [(1.0, 9.0), (6.0, 24.0), (12.0, 48.0), (20.0, 50.0)]
)
def test_limit_is_a_multiple_of_a_decode_step(
    clock: list[float],
    decode_ms: float,
    step_ms: float,
) -> None:
    budget = PrefillBudget(8192)
    budget.start_after_idle()
    steps(budget, clock, 60, decode_ms * 1e-3, 64, 0)
    steps(
        budget, clock, 60, decode_ms * 1e-3 + 1000 * 10e-6, 64, 1000
    )  # a prompt token costs 10 us
    assert budget.max_prefill_tokens(has_decodes=True) == pytest.approx(
        (step_ms - decode_ms) * 100, rel=1e-3
    )


def test_decodes_keep_the_prompt_token_cost(clock: list[float]) -> None:
    budget = PrefillBudget(8192)
    budget.start_after_idle()
    steps(budget, clock, 20, 0.008, 0, 800)
    before = budget.max_prefill_tokens(has_decodes=False)
    steps(budget, clock, 200, 0.006, 256, 0)
    assert budget.max_prefill_tokens(has_decodes=False) == before


def test_batches_may_have_long_steps(
    clock: list[float],
) -> None:
    budget = PrefillBudget(8192, bounds_decode_latency=False)
    budget.start_after_idle()
    steps(budget, clock, 1, 1.0, 0, 1000)
    assert budget.max_prefill_tokens(has_decodes=True) == pytest.approx(
        MAX_ANY_SECONDS * 1000, abs=1
    )


def test_idle_time_is_not_measured(clock: list[float]) -> None:
    budget = PrefillBudget(8192)
    for _ in range(3):
        clock[0] += 3600
        budget.start_after_idle()
        clock[0] += 0.009
        budget.finish_step(1000, 1000)
    assert budget.max_prefill_tokens(has_decodes=True) == pytest.approx(1000, abs=1)


def test_one_slow_step_changes_the_budget_little(clock: list[float]) -> None:
    budget = PrefillBudget(8192)
    budget.start_after_idle()
    clock[0] += 0.009
    budget.finish_step(1000, 1000)
    clock[0] += 0.018  # one step that took twice as long
    budget.finish_step(1000, 1000)
    assert budget.max_prefill_tokens(has_decodes=True) == pytest.approx(1000 / 1.2, abs=1)


def test_engine_applies_the_budget_to_all_prompts_together(clock: list[float]) -> None:
    world = World(chunk_size=1024, max_model_len=1024, num_pages=900, depth=1)
    runner = world.engine.runner
    plans: list[StepPlan] = []
    forward = runner.forward

    def slow(plan: StepPlan) -> None:
        plans.append(plan)
        clock[0] += float(plan.num_tokens) * 18e-6  # a chunk of 500 tokens fits the target
        forward(plan)

    runner.forward = slow  # type: ignore[method-assign]
    clock[0] += 3600  # without work
    world.submit(request(0, [i % 60 for i in range(400)], max_tokens=20))
    for _ in range(4):
        world.step()
    for i in (1, 2, 3):
        world.submit(request(i, [(j * 7 + i) % 60 for j in range(400)], max_tokens=4))
    world.run()
    mixed = [plan for plan in plans if plan.num_decodes and plan.num_rows > plan.num_decodes]
    assert max(len(plan.token_ids) for plan in mixed) == pytest.approx(500, abs=5), (
        "of all prompts together"
    )
    world.check(3)


def test_last_token_in_flight_needs_no_decode() -> None:
    world = World(chunk_size=64)
    rows = world.scheduler.columns
    world.submit(request(0, list(range(20)), max_tokens=1))
    world.step()
    assert len(rows.decoding()) == 1 and not rows.has_decodes
    world.submit(request(1, list(range(20)), max_tokens=2))
    world.step()
    assert rows.has_decodes
    world.run()
    world.check(1)
