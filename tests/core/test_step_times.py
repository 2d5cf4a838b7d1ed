"""The measured time of a step, from which the number of draft tokens is chosen."""

from __future__ import annotations

import numpy as np
import pytest
from engine_world import MODEL, World
from tokenspeed_testing.drafts import FixedDepth
from tokenspeed_testing.requests import request

from tokenspeed_core.api.drafters import Drafts
from tokenspeed_core.api.step import I32, StepResult
from tokenspeed_core.scheduler import prefill_budget
from tokenspeed_core.scheduler.drafts import FinishedStep

DEVICE, DRAFTER, CALLER = 1.0, 0.25, 0.0625  # seconds


class Timed(FixedDepth):
    """Notes the steps. It wants draft tokens only while `is_on`."""

    def __init__(self, max_drafts: int) -> None:
        super().__init__(max_drafts)
        self.steps: list[FinishedStep] = []
        self.is_on = True

    def max_drafts(self, num_rows: int) -> int:
        return super().max_drafts(num_rows) * self.is_on

    def finish_step(self, step: FinishedStep) -> None:
        self.steps.append(step)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(prefill_budget, "perf_counter", lambda: now[0])
    return now


def timed_world(
    depth: int, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> tuple[World, Timed]:
    """Return an engine with one sequence, whose device, drafter and caller take the times above."""
    world, timed = World(num_drafts=3, depth=depth), Timed(3)
    assert world.scheduler.drafts is not None
    world.scheduler.drafts._depth = timed
    collect, propose = world.engine.runner.collect, world.drafter.propose

    def slow_collect(step_id: int) -> StepResult:
        clock[0] += DEVICE
        return collect(step_id)

    def slow_propose(slots: I32, max_drafts: I32) -> Drafts:
        clock[0] += DRAFTER
        return propose(slots, max_drafts)

    monkeypatch.setattr(world.engine.runner, "collect", slow_collect)
    monkeypatch.setattr(world.drafter, "propose", slow_propose)
    prompt = np.random.default_rng(0).integers(0, MODEL.vocab_size, 5).tolist()
    world.submit(request(0, prompt, max_tokens=40))
    return world, timed


@pytest.mark.parametrize("depth", [1, 2])
def test_work_between_steps_counts(
    depth: int, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    world, timed = timed_world(depth, clock, monkeypatch)
    clock[0] += 100.0  # an idle engine
    while world.engine.has_work:
        world.step()
        clock[0] += CALLER
    first, *others, last = timed.steps
    assert first.seconds < DEVICE + 2 * CALLER, "the time without requests does not count"
    assert last.num_rows == 1
    assert others
    # The drafter also proposes before a step in flight is collected.
    counts = (1,) if depth == 1 else (1, 2)
    expected = {DEVICE + count * DRAFTER + CALLER for count in counts}
    assert {each.seconds for each in others} == expected


def test_plain_steps_are_steady_between_others(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    world, timed = timed_world(2, clock, monkeypatch)
    for i in range(12):
        timed.is_on = i not in range(4, 9)
        world.step()
    is_plain = [each.num_tokens == 1 and not each.num_chunk_tokens for each in timed.steps]
    first = is_plain.index(True)
    plain = [each.is_steady for each in timed.steps[first:] if each.num_tokens == 1]
    assert plain.count(True) >= 2
    assert not plain[0]
    assert not plain[-1]
    assert not any(each.is_steady for each in timed.steps if each.num_tokens > 1)
