"""The request that nobody sent: it warms everything up and leaves nothing behind."""

from __future__ import annotations

import pytest
from null_world import World, request

from tokenspeed_core.engine.engine import Engine
from tokenspeed_core.engine.rehearsal import rehearse


def drawn(world: World) -> list[int]:
    """Return what a request without a seed draws."""
    world.submit(request(1, [1], max_tokens=1, temperature=1.0))
    world.run()
    return world.tokens[1]


@pytest.mark.parametrize("max_model_len", [2, 3, 48, 300])
def test_a_rehearsal_runs_steps_and_leaves_no_block_no_sequence_and_no_draw_behind(max_model_len: int) -> None:
    world, other = (World(max_model_len=max_model_len, num_pages=90) for _ in range(2))
    engine = Engine(world.scheduler, world.runner)
    rehearse(engine, max_model_len)
    assert engine.num_steps >= 1
    counts = world.scheduler.kv.counts()
    assert counts.free == counts.total and not counts.cached
    assert not (world.scheduler.has_work or world.scheduler.roster.num_preemptions)
    assert drawn(world) == drawn(other)


def test_where_no_token_fits_behind_a_prompt_nothing_is_rehearsed() -> None:
    world = World(max_model_len=1)
    engine = Engine(world.scheduler, world.runner)
    rehearse(engine, 1)
    assert engine.num_steps == 0
