"""The scheduler: preempted sequences, rejections, and policies with unusual answers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from engine_world import World
from tokenspeed_testing.requests import request

from tokenspeed_core.api.policy import (
    Candidate,
    Decision,
    Limits,
    Policy,
    QueuedSequence,
    Room,
    View,
)
from tokenspeed_core.api.sampling import FinishReason
from tokenspeed_core.api.step import StepPlan, StepResult
from tokenspeed_core.errors import EngineDeadError
from tokenspeed_core.kv_cache.hashing import HashChain
from tokenspeed_core.kv_cache.match import Match
from tokenspeed_core.scheduler.policy import Ordered

PROMPT = list(range(1, 17))


def slot_of(world: World, sequence_id: int) -> int:
    return int(np.flatnonzero(world.scheduler.columns.sequence_id == sequence_id)[0])


@pytest.mark.parametrize(
    "num_steps", [1, 4]
)  # in the prompt, and when the first token is on its way
def test_first_token_after_preemption_reports_cached_tokens(
    num_steps: int,
) -> None:
    world = World(chunk_size=4)
    world.submit(request(1, PROMPT, max_tokens=1))
    world.run()
    world.submit(request(2, PROMPT + PROMPT, max_tokens=3))
    for _ in range(num_steps):
        world.step()
    assert not world.tokens[2]
    world.scheduler.preempt(slot_of(world, 2))
    world.run()
    world.check(2)
    assert world.cached[2] == 16


def test_preempted_sequence_ends_without_finite_logits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    world.submit(request(1, PROMPT, max_tokens=4))
    world.step()
    world.scheduler.preempt(slot_of(world, 1))
    collect = world.engine.runner.collect

    def no_finite_logit(step_id: int) -> StepResult:
        result = collect(step_id)
        return replace(result, token_ids=np.full_like(result.token_ids, -1))

    monkeypatch.setattr(world.engine.runner, "collect", no_finite_logit)
    world.step()
    assert (world.tokens[1], world.finish[1]) == ([], FinishReason.ERROR)
    world.run(2)


def test_queue_rejects_too_many_sequences() -> None:
    world = World(max_queued=4)
    rejected = world.scheduler.submit(request(1, PROMPT, n=5))
    assert rejected is not None
    assert rejected.reason == "bad_request"
    assert world.scheduler.submit(request(1, PROMPT, n=4)) is None
    full = world.scheduler.submit(request(5, PROMPT, n=1))
    assert full is not None
    assert full.reason == "queue_full"


class Generous:
    """First come, first served, but gives prompts more tokens than they have or the budget allows."""

    def __init__(self, *, to_running: int, to_waiting: int) -> None:
        self.inner, self.to_running, self.to_waiting = (
            Ordered(by_priority=False),
            to_running,
            to_waiting,
        )

    def key(self, sequence: QueuedSequence) -> tuple[int, int]:
        return self.inner.key(sequence)

    def decide(self, view: View, limits: Limits) -> Decision:
        decision = self.inner.decide(view, limits)
        decision.num_query_tokens[view.num_decodes :] += self.to_running
        return decision

    def admit(self, candidate: Candidate, room: Room) -> int:
        return self.inner.admit(candidate, room) + self.to_waiting


def planned(world: World, monkeypatch: pytest.MonkeyPatch) -> list[StepPlan]:
    """Return a list that every launched plan is added to."""
    plans: list[StepPlan] = []
    forward = world.runner.forward
    monkeypatch.setattr(world.runner, "forward", lambda plan: (plans.append(plan), forward(plan)))
    return plans


@pytest.mark.parametrize(("to_running", "to_waiting", "chunk_size"), [(0, 5, 20), (5, 0, 8)])
def test_chunk_ends_at_the_known_tokens(
    to_running: int,
    to_waiting: int,
    chunk_size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = Generous(to_running=to_running, to_waiting=to_waiting)
    world = World(policy=policy, chunk_size=chunk_size, max_num_seqs=1)
    plans = planned(world, monkeypatch)
    prompts = [[40] * 13, [1, 2, 3, 4, 5, 6, 7, 8, 9]]  # the second gets the first one's slot
    for sequence_id, prompt in enumerate(prompts):
        world.submit(request(sequence_id, prompt, max_tokens=3))
    world.run(100)
    assert [token for plan in plans for token in plan.token_ids.tolist()] == [
        *prompts[0],
        *prompts[1],
    ]
    for sequence_id in (0, 1):
        world.check(sequence_id)
        assert world.finish[sequence_id] is FinishReason.LENGTH


def test_first_chunk_fits_the_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(policy=Generous(to_running=0, to_waiting=30), chunk_size=8)
    plans = planned(world, monkeypatch)
    for sequence_id in range(3):
        world.submit(request(sequence_id, [sequence_id] * 13, max_tokens=3))
    world.run()
    assert max(plan.num_tokens for plan in plans) == 8


def test_blocked_sequence_waits_for_more_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(num_pages=8)
    asked = 0
    match = world.scheduler.kv.match

    def counted(chain: HashChain, num_tokens: int) -> Match:
        nonlocal asked
        asked += 1
        return match(chain, num_tokens)

    monkeypatch.setattr(world.scheduler.kv, "match", counted)
    world.submit(request(0, PROMPT, max_tokens=12))
    world.submit(request(1, PROMPT[::-1], max_tokens=12))
    while 0 not in world.finish:
        world.step()
        assert asked <= 2  # once for each
    world.run()
    assert 2 < asked < 6
    for sequence_id in (0, 1):
        world.check(sequence_id)


def test_preempted_sequence_finds_its_output_in_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    plans = planned(world, monkeypatch)
    world.submit(request(1, PROMPT, max_tokens=20))
    while len(world.tokens[1]) < 13:
        world.step()
    world.scheduler.preempt(slot_of(world, 1))
    num_before = len(plans)
    world.run()
    world.check(1)
    again = [plan for plan in plans[num_before:] if len(plan.token_ids)]
    assert [int(start) for plan in again for start in plan.num_computed_tokens] == [28]


class Postponing:
    """First come, first served, but a prompt is never cut and at most one is admitted per step."""

    def __init__(self) -> None:
        self.inner = Ordered(by_priority=False)

    def key(self, sequence: QueuedSequence) -> tuple[int, int]:
        return self.inner.key(sequence)

    def decide(self, view: View, limits: Limits) -> Decision:
        return self.inner.decide(view, limits)

    def admit(self, candidate: Candidate, room: Room) -> int:
        rest = candidate.num_tokens - candidate.num_cached_tokens
        return rest if rest <= room.token_budget else 0


@pytest.mark.parametrize(("policy", "chunk_size"), [("fcfs", -1), (Postponing(), 16)])
def test_prompts_beyond_the_budget_enter_in_the_next_steps(
    policy: str | Policy, chunk_size: int
) -> None:
    world = World(policy=policy, chunk_size=chunk_size, num_pages=60)  # 16 tokens per step
    for sequence_id in range(4):
        world.submit(request(sequence_id, [sequence_id] * 10, max_tokens=12))
    for _ in range(5):
        world.step()
    assert world.scheduler.sequences.num_running == 4
    assert not world.finish
    world.run()
    for sequence_id in range(4):
        world.check(sequence_id)


class Refusing(Postponing):
    """Runs nothing: neither admits sequences nor gives tokens to running ones."""

    def __init__(self, *, admits: bool) -> None:
        super().__init__()
        self.admits = admits

    def __str__(self) -> str:
        return "refusing"

    def decide(self, view: View, limits: Limits) -> Decision:
        return Decision(np.zeros_like(view.num_query_tokens), np.zeros(0, np.int32))

    def admit(self, candidate: Candidate, room: Room) -> int:
        return super().admit(candidate, room) if self.admits else 0


@pytest.mark.parametrize("admits", [False, True])
def test_a_policy_that_runs_nothing_ends_the_engine(admits: bool) -> None:
    world = World(policy=Refusing(admits=admits))
    world.submit(request(0, PROMPT))
    with pytest.raises(EngineDeadError, match="refusing"):
        world.run(20)
