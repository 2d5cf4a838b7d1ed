"""The work of a collected step that the next step's plan does not need follows the next launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from engine_world import FULL, MODEL, World
from tokenspeed_testing.requests import request

from tokenspeed_core.api.cache_groups import SlidingWindow
from tokenspeed_core.api.drafters import Drafts
from tokenspeed_core.api.step import I32
from tokenspeed_core.scheduler.step_plan_builder import StepPlanBuilder

PROMPT = list(range(1, 17))


def record(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, calls: list[str], label: str
) -> None:
    """Append a label to `calls` at each call of a method."""
    method: Callable[..., Any] = getattr(owner, name)

    def recorded(*arguments: Any, **keywords: Any) -> Any:
        calls.append(label)
        return method(*arguments, **keywords)

    monkeypatch.setattr(owner, name, recorded)


def num_known(world: World, sequence_id: int) -> int:
    return len(world.requests[sequence_id].prompt) + len(world.tokens[sequence_id])


def test_accounts_follow_the_next_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    world, calls = World(num_drafts=3), list[str]()
    scheduler = world.scheduler
    record(monkeypatch, world.engine.runner, "forward", calls, "forward")
    record(monkeypatch, scheduler, "apply", calls, "apply")
    record(monkeypatch, scheduler.counters, "verify", calls, "count")
    record(monkeypatch, scheduler.drafts, "observe", calls, "observe")
    record(monkeypatch, scheduler.sequences, "cache_known_blocks", calls, "cache")
    world.submit(request(1, PROMPT, max_tokens=30))
    orders = set()
    while scheduler.has_work:
        calls.clear()
        world.step()
        if "observe" in calls and not world.finish:
            orders.add(tuple(calls))
    assert orders == {
        ("apply", "forward", "count", "observe"),
        ("apply", "forward", "count", "observe", "cache"),
    }
    assert calls[0] == "apply"
    assert set(calls) <= {"apply", "count", "observe", "cache"}
    world.check(1)


def test_every_draft_token_is_counted_once() -> None:
    world = World(num_drafts=3)
    num_drafted = 0
    forward = world.engine.runner.forward

    def count(plan: Any) -> None:
        nonlocal num_drafted
        num_drafted += plan.num_draft_tokens
        forward(plan)

    world.engine.runner.forward = count  # type: ignore[method-assign]
    for i in range(3):
        world.submit(request(i, [*PROMPT, i], max_tokens=9 + i))
    world.run()
    assert num_drafted > 10
    assert world.engine.stats().num_draft_tokens == num_drafted


@pytest.mark.parametrize("max_tokens", [4, 9, 17])
def test_idle_engine_has_sent_all_tokens(max_tokens: int) -> None:
    world = World(num_drafts=3)
    world.submit(request(1, PROMPT, max_tokens=max_tokens))
    world.run()
    world.check(1)
    assert len(world.tokens[1]) == max_tokens
    assert world.scheduler.kv.counts().held == 0


def drafting(min_tokens: int) -> World:
    """Return a world with a step with draft tokens in flight, after `min_tokens` or more tokens of a sequence."""
    world = World(num_drafts=3)
    world.submit(request(1, PROMPT, max_tokens=30))
    in_flight = world.scheduler.in_flight
    while not (
        in_flight and in_flight[-1].plan.num_draft_tokens and len(world.tokens[1]) >= min_tokens
    ):
        world.step()
    return world


@pytest.mark.parametrize("min_tokens", range(2, 14, 2))
def test_waiting_sequence_finds_the_newest_blocks(min_tokens: int) -> None:
    world = drafting(min_tokens)
    output = MODEL.expected(PROMPT, len(world.tokens[1]) + 8)
    world.submit(request(2, PROMPT + output, max_tokens=1))
    world.step()
    num_full = (num_known(world, 1) - 1) // 4
    world.run()
    assert world.cached[2] == 4 * num_full


@pytest.mark.parametrize("min_tokens", range(2, 14, 2))
def test_preempted_sequence_finds_the_newest_blocks(
    monkeypatch: pytest.MonkeyPatch, min_tokens: int
) -> None:
    world = drafting(min_tokens)
    plan = world.scheduler.plan
    (slot,) = np.flatnonzero(world.scheduler.columns.sequence_id == 1)

    def preempt_and_plan(max_prefill_tokens: int | None = None) -> StepPlanBuilder | None:
        world.scheduler.preempt(int(slot))
        return plan(max_prefill_tokens)

    with monkeypatch.context() as patch:
        patch.setattr(world.scheduler, "plan", preempt_and_plan)
        world.step()
    starts = world.scheduler.in_flight[-1].plan.num_computed_tokens.tolist()
    assert starts == [4 * ((num_known(world, 1) - 1) // 4)]
    world.run()
    world.check(1)


def test_blocks_are_cached_before_they_leave_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """One step may fill a block, and the next one move the window past it."""
    window = SlidingWindow("window", 1, 1, 1, MODEL.window)
    world = World(groups=(FULL, window), num_pages=80, num_drafts=7)

    def propose(slots: I32, max_drafts: I32) -> Drafts:
        parts = [
            MODEL.expected(world.drafter.tokens[slot], most)
            for slot, most in zip(slots.tolist(), max_drafts.tolist(), strict=True)
        ]
        return Drafts(max_drafts, np.concatenate(parts).astype(np.int32))

    monkeypatch.setattr(world.drafter, "propose", propose)
    world.submit(request(1, PROMPT, max_tokens=30))
    world.run()
    kv = world.scheduler.kv
    chain = kv.chain(world.requests[1].cache_namespace, 0)
    chain.extend(np.asarray(PROMPT + world.tokens[1], np.int32))
    ends = range(16, 45, 4)
    assert [kv.match(chain, end + 1).num_tokens for end in ends] == list(ends)
