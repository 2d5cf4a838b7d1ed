"""What a sequence that loses its slot early, or asks for too much, is told."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from null_world import World, request

from tokenspeed_core.messages import Finish
from tokenspeed_core.step import StepResult

PROMPT = list(range(1, 17))


def slot_of(world: World, sequence_id: int) -> int:
    return int(np.flatnonzero(world.scheduler.rows.sequence_id == sequence_id)[0])


@pytest.mark.parametrize("num_steps", [1, 4])   # in the prompt, and when the first token is on its way
def test_the_first_token_tells_of_cached_ones_though_the_slot_was_lost_before_it(num_steps: int) -> None:
    world = World(chunk_size=4)
    world.submit(request(1, PROMPT, max_tokens=1))
    world.run()
    world.submit(request(2, PROMPT + PROMPT, max_tokens=3))
    for _ in range(num_steps):
        world.step()
    assert not world.tokens[2]
    world.scheduler.roster.preempt(slot_of(world, 2))
    world.run()
    world.check(2)
    assert world.cached[2] == 16


def test_a_sequence_that_lost_its_slot_ends_without_a_token_where_the_device_found_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    world.submit(request(1, PROMPT, max_tokens=4))
    world.step()
    world.scheduler.roster.preempt(slot_of(world, 1))
    collect = world.engine.runner.collect

    def no_finite_logit(step_id: int) -> StepResult:
        result = collect(step_id)
        return replace(result, token_ids=np.full_like(result.token_ids, -1))

    monkeypatch.setattr(world.engine.runner, "collect", no_finite_logit)
    world.step()
    assert (world.tokens[1], world.finish[1]) == ([], Finish.ERROR)
    world.run(2)


def test_more_sequences_than_the_queue_ever_takes_are_refused_for_good() -> None:
    world = World(max_queued=4)
    refused = world.scheduler.submit(request(1, PROMPT, n=5))
    assert refused is not None
    assert refused.reason == "bad_request"
    assert world.scheduler.submit(request(1, PROMPT, n=4)) is None
    waits = world.scheduler.submit(request(5, PROMPT, n=1))
    assert waits is not None
    assert waits.reason == "queue_full"
