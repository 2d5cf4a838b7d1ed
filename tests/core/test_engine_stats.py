"""The counters that an engine sends with its heartbeats."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from engine_world import World
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenspeed_testing.requests import request

from tokenspeed_core.engine.messages import Heartbeat, to_api
from tokenspeed_core.engine.stats import EngineStats
from tokenspeed_core.engine.wire import pack


@dataclass
class DraftSourceState:
    """The part of a `DraftSource` that the statistics read."""

    is_paused: bool
    budget: float


def stats_of(world: World) -> EngineStats:
    """Return the statistics, as an API worker receives them."""
    scheduler = world.scheduler
    stats = scheduler.counters.snapshot(scheduler.kv, scheduler.num_preemptions)
    received = to_api.unpack(pack(Heartbeat(1, 0, 0, False, stats)))
    assert received.stats == stats
    return stats


@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=8))
def test_counters_add_up_to_the_requests(requests: list[tuple[int, int]]) -> None:
    world = World()
    for number, (num_prompt, max_tokens) in enumerate(requests):
        prompt = [1 + (number + i) % 7 for i in range(num_prompt)]
        world.submit(request(number, prompt, max_tokens=max_tokens))
    world.run()
    stats = stats_of(world)
    assert stats.num_prompt_tokens == sum(num for num, _ in requests)
    assert stats.num_output_tokens == sum(num for _, num in requests)
    assert stats.num_prefix_queries == stats.num_prompt_tokens
    assert stats.num_prefix_hits + stats.num_prefill_tokens >= stats.num_prompt_tokens
    assert sum(stats.queue.counts) == sum(stats.prefill.counts) == len(requests)
    assert sum(stats.step.counts) == sum(stats.host.counts) == world.engine.num_steps
    assert stats.num_pages == world.scheduler.kv.pool.num_pages
    assert stats.kv_usage == 0


def test_repeated_prompt_hits_the_prefix_cache() -> None:
    world = World()
    prompt = list(range(1, 41))
    for number in range(2):
        world.submit(request(number, prompt, max_tokens=1))
        world.run()
    stats = stats_of(world)
    assert stats.num_prefix_queries == 2 * len(prompt)
    assert 0 < stats.num_prefix_hits < len(prompt)


def test_preempted_sequences_are_counted_once() -> None:
    world = World(num_pages=8, block_size=4, max_num_seqs=4)
    for number in range(4):
        world.submit(request(number, [1 + number] * 7, max_tokens=16))
    world.run()
    stats = stats_of(world)
    assert stats.num_preemptions > 0
    assert sum(stats.queue.counts) == sum(stats.prefill.counts) == 4
    assert stats.num_prompt_tokens == 28
    assert stats.num_output_tokens == 64


def test_draft_tokens_are_counted_by_position() -> None:
    world = World()
    counters, kv = world.scheduler.counters, world.scheduler.kv
    for drafts, accepted in (([2, 1], [2, 0]), ([4, 1, 1], [1, 1, 0])):
        counters.verify(np.asarray(drafts, np.int32), np.asarray(accepted, np.int32))
    drafting = DraftSourceState(is_paused=False, budget=1.5)
    stats = counters.snapshot(kv, 0, drafting)  # type: ignore[arg-type]
    assert (stats.num_draft_rows, stats.num_draft_tokens) == (5, 9)
    assert stats.num_drafted == (5, 2, 1, 1)
    assert stats.num_accepted == (3, 1, 0, 0)
    assert (stats.drafts_per_row, stats.is_draft_paused, stats.draft_budget) == (2.0, False, 1.5)
    drafting.is_paused = True
    stats = counters.snapshot(kv, 0, drafting)  # type: ignore[arg-type]
    assert (stats.drafts_per_row, stats.is_draft_paused) == (0.0, True)
