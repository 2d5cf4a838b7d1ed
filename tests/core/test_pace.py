"""The engine's pace: how many prompt tokens a step may have, by what steps have taken."""

from __future__ import annotations

import pytest
from null_world import World, request

from tokenspeed_core.api.step import StepPlan
from tokenspeed_core.scheduler import prefill_budget as pace
from tokenspeed_core.scheduler.prefill_budget import (
    FIRST_CHUNK,
    MIN_CHUNK,
    PATIENCE_SECONDS,
    PrefillBudget,
)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands still until the test moves it."""
    now = [100.0]
    monkeypatch.setattr(pace, "perf_counter", lambda: now[0])
    return now


def test_a_pace_without_a_measurement_begins_with_a_small_step(clock: list[float]) -> None:
    assert PrefillBudget(8192).max_prefill(beside_decodes=False) == FIRST_CHUNK
    assert PrefillBudget(64).max_prefill(beside_decodes=False) == 64
    small = PrefillBudget(8192)
    small.launched()
    clock[0] += 1
    small.finished(8, 8)  # too small a step to say what a token costs
    assert small.max_prefill(beside_decodes=True) == FIRST_CHUNK


def steps(
    measured: PrefillBudget, clock: list[float], num: int, seconds: float, decodes: int, prompt: int
) -> None:
    """Let `num` steps take so long each, of so many decodes and prompt tokens."""
    for _ in range(num):
        clock[0] += seconds
        measured.finished(decodes + prompt, prompt)


@pytest.mark.parametrize(
    ("microseconds_per_token", "expected"),
    [
        (1000.0, MIN_CHUNK),
        (24.0, 375),
        (2.0, 4500),
        (0.1, 8192),
    ],
)
def test_a_chunk_beside_decodes_of_unknown_cost_takes_the_least_time(
    clock: list[float],
    microseconds_per_token: float,
    expected: int,
) -> None:
    measured = PrefillBudget(8192)
    measured.launched()
    steps(measured, clock, 1, 4096 * microseconds_per_token * 1e-6, 0, 4096)
    assert measured.max_prefill(beside_decodes=True) == pytest.approx(expected, abs=1)
    alone = min(8192, max(MIN_CHUNK, PATIENCE_SECONDS / (microseconds_per_token * 1e-6)))
    assert measured.max_prefill(beside_decodes=False) == pytest.approx(alone, abs=1)


@pytest.mark.parametrize(
    ("decode_ms", "step_ms"), [(1.0, 9.0), (6.0, 24.0), (12.0, 48.0), (20.0, 50.0)]
)
def test_a_step_may_take_four_times_as_long_as_decodes_alone_within_bounds(
    clock: list[float],
    decode_ms: float,
    step_ms: float,
) -> None:
    measured = PrefillBudget(8192)
    measured.launched()
    steps(measured, clock, 60, decode_ms * 1e-3, 64, 0)
    steps(
        measured, clock, 60, decode_ms * 1e-3 + 1000 * 10e-6, 64, 1000
    )  # a prompt token costs 10 us
    assert measured.max_prefill(beside_decodes=True) == pytest.approx(
        (step_ms - decode_ms) * 100, rel=1e-3
    )


def test_steps_of_decodes_do_not_make_prompt_tokens_look_dear(clock: list[float]) -> None:
    measured = PrefillBudget(8192)
    measured.launched()
    steps(measured, clock, 20, 0.008, 0, 800)
    before = measured.max_prefill(beside_decodes=False)
    steps(measured, clock, 200, 0.006, 256, 0)
    assert measured.max_prefill(beside_decodes=False) == before


def test_where_nobody_watches_tokens_come_only_the_patience_bounds_a_step(
    clock: list[float],
) -> None:
    measured = PrefillBudget(8192, limits_prefill_while_decoding=False)
    measured.launched()
    steps(measured, clock, 1, 1.0, 0, 1000)
    assert measured.max_prefill(beside_decodes=True) == pytest.approx(
        PATIENCE_SECONDS * 1000, abs=1
    )


def test_time_without_work_is_not_counted_as_cost(clock: list[float]) -> None:
    measured = PrefillBudget(8192)
    for _ in range(3):
        clock[0] += 3600
        measured.launched()
        clock[0] += 0.009
        measured.finished(1000, 1000)
    assert measured.max_prefill(beside_decodes=True) == pytest.approx(1000, abs=1)


def test_a_pace_follows_the_steps_slowly(clock: list[float]) -> None:
    measured = PrefillBudget(8192)
    measured.launched()
    clock[0] += 0.009
    measured.finished(1000, 1000)
    clock[0] += 0.018  # one step that took twice as long
    measured.finished(1000, 1000)
    assert measured.max_prefill(beside_decodes=True) == pytest.approx(1000 / 1.2, abs=1)


def test_the_engine_hands_its_pace_to_the_scheduler(clock: list[float]) -> None:
    world = World(chunk_size=1024, max_model_len=1024, num_blocks=900, depth=1)
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
    beside = [plan for plan in plans if plan.num_decodes and plan.num_rows > plan.num_decodes]
    assert max(len(plan.token_ids) for plan in beside) == pytest.approx(500, abs=5), (
        "of all prompts together"
    )
    world.check(3)


def test_a_prompt_that_gives_one_token_is_not_a_decode_that_waits() -> None:
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
