"""The warm-up serves internal requests and leaves no state."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from engine_world import World
from tokenspeed_testing.requests import request

from tokenspeed_core.api.step import StepResult
from tokenspeed_core.engine.engine import Engine
from tokenspeed_core.engine.messages import Rejected, Submit
from tokenspeed_core.engine.warmup import warm_up


def drawn(world: World) -> list[int]:
    """Return the tokens of a sampled request without a seed."""
    world.submit(request(1, [1], max_tokens=1, temperature=1.0))
    world.run()
    return world.tokens[1]


@pytest.mark.parametrize("max_model_len", [2, 3, 48, 300])
def test_warm_up_leaves_no_blocks_sequences_or_draws(
    max_model_len: int,
) -> None:
    world, other = (World(max_model_len=max_model_len, num_pages=90) for _ in range(2))
    engine = Engine(world.scheduler, world.runner)
    warm_up(engine)
    assert engine.num_steps >= 1
    pool = world.scheduler.kv.pool
    assert pool.counts().free == pool.num_pages
    assert not (world.scheduler.has_work or world.scheduler.num_preemptions)
    assert drawn(world) == drawn(other)


def test_warm_up_serves_a_greedy_and_a_sampled_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(max_model_len=300, num_pages=90)
    engine = Engine(world.scheduler, world.runner)
    asked: list[tuple[int, float]] = []

    def submit(request: Submit) -> Rejected | None:
        asked.append((len(request.prompt), request.temperature))
        return world.scheduler.submit(request)

    monkeypatch.setattr(engine, "submit", submit)
    warm_up(engine)
    assert asked == [(256, 0), (16, 1)]


@pytest.mark.parametrize("nth", [0, 1])
@pytest.mark.parametrize(
    ("bad", "is_fine"), [((), True), ((0,), True), ((1,), True), ((0, 1), False)], ids=str
)
def test_warm_up_reports_missing_finite_logits(
    monkeypatch: pytest.MonkeyPatch, bad: tuple[int, ...], is_fine: bool, nth: int
) -> None:
    world = World()
    engine = Engine(world.scheduler, world.runner)
    submit, collect = engine.submit, world.runner.collect
    num_tokens: list[int] = []  # of each request so far

    def begin(request: Submit) -> Rejected | None:
        num_tokens.append(0)
        return submit(request)

    def spoil(step_id: int) -> StepResult:
        result: StepResult = collect(step_id)
        num_before, num_tokens[-1] = num_tokens[-1], num_tokens[-1] + len(result.token_ids)
        is_bad = len(num_tokens) - 1 in bad and num_before == nth
        return replace(result, token_ids=np.full_like(result.token_ids, -1)) if is_bad else result

    monkeypatch.setattr(engine, "submit", begin)
    monkeypatch.setattr(world.runner, "collect", spoil)
    assert warm_up(engine) is is_fine
    assert not world.scheduler.has_work


def test_warm_up_needs_room_for_a_token() -> None:
    world = World(max_model_len=1)
    engine = Engine(world.scheduler, world.runner)
    assert warm_up(engine)
    assert engine.num_steps == 0
