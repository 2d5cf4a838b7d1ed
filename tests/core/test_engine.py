"""The step loop: steps in flight, failed steps, and when the engine gives up."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import pytest
from engine_world import MASKED, World
from tokenspeed_testing.requests import request

from tokenspeed_core.api.hooks import StepRecord
from tokenspeed_core.api.sampling import FinishReason
from tokenspeed_core.api.step import (
    LateInputs,
    OutOfMemory,
    Runner,
    StepFailed,
    StepPlan,
    StepResult,
)
from tokenspeed_core.engine.engine import MAX_FAILURES, Engine
from tokenspeed_core.errors import EngineDeadError, TokenSpeedError
from tokenspeed_core.kv_cache import hashing
from tokenspeed_core.kv_cache.hashing import HashChain

PLACES = ["forward", "sample", "collect"]


class WatchedRunner:
    """A runner that records every call and fails at given steps."""

    def __init__(
        self,
        runner: Runner,
        place: str = "",
        steps: frozenset[int] = frozenset(),
        error: type[StepFailed] = StepFailed,
    ) -> None:
        self.calls: list[tuple[str, int]] = []
        self.max_in_flight = 0
        self.num_closed = 0
        self._runner, self._place, self._steps, self._error = runner, place, steps, error
        self._num_in_flight = 0

    def _note(self, place: str, step_id: int) -> None:
        self.calls.append((place, step_id))
        if place == self._place and step_id in self._steps:
            raise self._error(f"{place} of step {step_id} was made to fail")

    def forward(self, plan: StepPlan) -> None:
        self._note("forward", plan.step_id)
        self._runner.forward(plan)

    def sample(self, step_id: int, late: LateInputs | None) -> None:
        self._note("sample", step_id)
        self._runner.sample(step_id, late)
        self._num_in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self._num_in_flight)

    def collect(self, step_id: int) -> StepResult:
        self._num_in_flight -= 1
        result = self._runner.collect(step_id)
        self._note("collect", step_id)
        return result

    def close(self) -> None:
        self.num_closed += 1

    def never_collected(self) -> set[int]:
        """Return the steps that were sampled but never collected."""
        sampled = {step for place, step in self.calls if place == "sample"}
        if self._place == "sample":
            sampled -= self._steps
        return sampled - {step for place, step in self.calls if place == "collect"}


def watched(
    world: World, place: str = "", *steps: int, error: type[StepFailed] = StepFailed
) -> WatchedRunner:
    runner = WatchedRunner(world.engine.runner, place, frozenset(steps), error)
    world.engine.runner = runner
    return runner


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_depth_bounds_the_steps_in_flight(depth: int) -> None:
    world = World(depth=depth)
    runner = watched(world)
    world.submit(request(0, [1, 2, 3], max_tokens=20))
    world.run()
    world.check(0)
    assert world.finish == {0: FinishReason.LENGTH}
    assert runner.max_in_flight == depth
    assert runner.never_collected() == set()


def test_next_step_is_launched_before_collecting_the_last() -> None:
    world = World(depth=2)
    runner = watched(world)
    world.submit(request(0, [1, 2, 3], max_tokens=6))
    world.run()
    for step in range(2, 6):
        assert runner.calls.index(("sample", step)) < runner.calls.index(("collect", step - 1))


def test_prompts_are_hashed_at_admission() -> None:
    world = World(chunk_size=16)
    runner = watched(world)
    prompts = [[1] * 12, [2] * 12, [3] * 12, [1] * 12 + [4]]
    chains = []
    for i, prompt in enumerate(prompts):
        world.submit(request(i, prompt, max_tokens=2))
        state = world.scheduler.sequences.get(i)
        assert state is not None
        chains.append(state.sequence.chain)
    world.engine.step()
    assert runner.calls == [("forward", 1), ("sample", 1)]
    assert [chain.num_tokens for chain in chains] == [12, 12, 0, 0]
    world.run()
    for i in range(len(prompts)):
        world.check(i)
    assert world.cached[3] == 12  # in the blocks of the first


def test_prompt_of_several_sequences_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    digests: list[object] = []

    def counted(*words: Any, **keywords: Any) -> object:
        digests.append(words)
        return blake2b(*words, **keywords)

    monkeypatch.setattr(hashing, "blake2b", counted)
    world = World()  # blocks of 4
    world.submit(request(0, [1] * 12, n=3, max_tokens=1))
    world.run()
    assert len(digests) == 1 + 3  # the root, and each block


def test_without_prefix_caching_nothing_is_hashed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(prefix_caching=False)
    asked: list[object] = []
    monkeypatch.setattr(
        HashChain, "extend", lambda chain, tokens: asked.append(len(tokens) // chain.granularity)
    )
    world.submit(request(0, [1] * 12, n=2, max_tokens=20))
    world.run()
    for sequence_id in (0, 1):
        world.check(sequence_id)
    assert asked == [0] * (
        1 + 2 + 2
    )  # the prompt, and each sequence when it is admitted and when it ends


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_steps_are_collected_in_launch_order(depth: int) -> None:
    world = World(depth=depth)
    runner = watched(world)
    for i in range(4):
        world.submit(request(i, [1, 2, 3, i], max_tokens=5 + i))
    world.run()
    for place in PLACES:
        steps = [step for each, step in runner.calls if each == place]
        assert steps == list(range(1, len(steps) + 1))


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("step", [1, 3, 7])
def test_failed_step_ends_only_sequences_in_flight(place: str, step: int, depth: int) -> None:
    world = World(depth=depth, max_num_seqs=2)
    runner = watched(world, place, step)
    for i in range(6):
        world.submit(request(i, [1, 2, 3, i], max_tokens=4))
    world.run()
    for i in range(6):
        world.check(i)
    failed = [i for i in range(6) if world.finish[i] is FinishReason.ERROR]
    assert 1 <= len(failed) <= 4
    assert set(world.finish.values()) == {FinishReason.ERROR, FinishReason.LENGTH}
    assert runner.never_collected() == set()
    world.step()
    counts = world.scheduler.kv.counts()
    assert (counts.held, counts.pending) == (0, 0)


@pytest.mark.parametrize("place", PLACES)
def test_steps_before_a_failed_one_deliver_tokens(place: str) -> None:
    world = World(depth=3)
    watched(world, place, 5)
    world.submit(request(0, [1, 2, 3], max_tokens=20))
    world.run()
    world.check(0)
    assert len(world.tokens[0]) == 4
    assert world.finish == {0: FinishReason.ERROR}


@pytest.mark.parametrize("place", PLACES)
def test_blocks_of_a_failed_step_are_not_cached(place: str) -> None:
    world = World(chunk_size=64)
    watched(world, place, 1)
    prompt = list(range(20))
    for sequence_id in (0, 1):
        world.submit(request(sequence_id, prompt))
        world.run()
    assert world.finish == {0: FinishReason.ERROR, 1: FinishReason.LENGTH}
    assert world.cached[1] == 0
    world.check(1)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("step", [1, 2, 5])
def test_mask_of_a_failed_step_ends_the_sequence(step: int, depth: int) -> None:
    world = World(depth=depth)
    runner = watched(world, "collect", step)
    world.submit(request(0, [1, 2, 3], max_tokens=10, priority=MASKED))
    world.run()
    assert world.finish == {0: FinishReason.ERROR}
    world.submit(request(1, [1, 2, 3], max_tokens=10, priority=MASKED))
    world.run()
    world.check(1)
    assert world.finish[1] is FinishReason.LENGTH
    assert runner.never_collected() == set()


@pytest.mark.parametrize("place", PLACES)
def test_engine_ends_after_three_failed_steps(place: str) -> None:
    world = World(depth=1)
    watched(world, place, *range(1, 100))
    for attempt in range(MAX_FAILURES):
        world.submit(request(attempt, [1, 2, 3]))
        if attempt < MAX_FAILURES - 1:
            world.run()
            assert world.finish[attempt] is FinishReason.ERROR
    with pytest.raises(EngineDeadError, match=f"{place} of step 3") as caught:
        world.run()
    assert isinstance(caught.value, TokenSpeedError)
    assert isinstance(caught.value.__cause__, StepFailed)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("place", PLACES)
def test_out_of_memory_never_ends_the_engine(place: str, depth: int) -> None:
    world = World(depth=depth)
    num_steps = 0
    runner = watched(world, place, *range(2, 10 * MAX_FAILURES), error=OutOfMemory)
    while num_steps < 10 * MAX_FAILURES:
        world.submit(request(num_steps, [1, 2, 3], max_tokens=4))
        world.run()
        num_steps = max(step for _, step in runner.calls) + 1
    world.submit(request(num_steps, [1, 2, 3], max_tokens=4))
    world.run()
    assert world.finish.pop(num_steps) is FinishReason.LENGTH
    assert list(world.finish.values()).count(FinishReason.ERROR) > MAX_FAILURES
    assert runner.never_collected() == set()


def test_without_allowed_failures_the_first_ends_the_engine() -> None:
    for error in (StepFailed, OutOfMemory):
        world = World()
        watched(world, "forward", 1, error=error)
        world.engine = Engine(world.scheduler, world.engine.runner, max_failures=0)
        world.submit(request(0, [1, 2, 3]))
        with pytest.raises(EngineDeadError, match="forward of step 1"):
            world.run()


@pytest.mark.parametrize("place", PLACES)
def test_good_step_resets_the_count_of_failures(place: str) -> None:
    world = World(depth=1)
    watched(world, place, 1, 2, 4, 5, 7, 8)
    for i in range(7):
        world.submit(request(i, [1, 2, 3], max_tokens=1))
        world.run()
    assert [world.finish[i] is FinishReason.ERROR for i in range(7)] == [
        True,
        True,
        False,
        True,
        True,
        False,
        True,
    ]


def test_reset_empties_the_prefix_cache() -> None:
    world = World()
    for sequence_id in range(3):
        world.submit(request(sequence_id, list(range(20))))
        world.run()
        if sequence_id == 1:
            world.engine.reset_prefix_cache()
    assert world.cached == {0: 0, 1: 16, 2: 0}
    world.check(2)


def test_close_closes_the_runner() -> None:
    world = World()
    runner = watched(world)
    world.engine.close()
    assert runner.num_closed == 1


def test_step_without_work_does_nothing() -> None:
    world = World()
    runner = watched(world)
    assert world.engine.step() == []
    assert runner.calls == []


def test_observer_gets_every_step() -> None:
    world = World(chunk_size=64)
    heard: list[StepRecord] = []
    engine = Engine(world.scheduler, world.runner, observe=heard.append)
    world.scheduler.submit(request(0, [1, 2, 3], max_tokens=4))
    while engine.has_work:
        engine.step()
    assert [record.step_id for record in heard] == list(range(1, engine.num_steps + 1))
    assert (heard[0].num_decodes, heard[0].num_tokens) == (0, 3)
    assert (heard[1].num_decodes, heard[1].num_tokens) == (1, 1)
    assert all(record.duration >= 0 for record in heard)
