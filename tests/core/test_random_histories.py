"""Scheduler, KV manager and step loop on the fake model, compared with its sequential oracle."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from engine_world import GROUPS, MASKED, World, audit
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tokenspeed_testing.requests import request

from tokenspeed_core.api.sampling import FinishReason
from tokenspeed_core.api.step import StepPlan
from tokenspeed_core.kv_cache import manager
from tokenspeed_core.scheduler import admission, scheduler

pytestmark = pytest.mark.slow


def with_release(quick: range, slow: range) -> list[Any]:
    """Return seeds, of which the `release` checks run those in `slow`."""
    return [*quick, *(pytest.param(seed, marks=pytest.mark.release) for seed in slow)]


prompts = st.builds(
    lambda base, cut, tail: [(base * 5 + i) % 60 for i in range(cut)] + tail,
    st.integers(0, 2),
    st.integers(1, 22),
    st.lists(st.integers(0, 59), max_size=4),
)


arrivals = st.fixed_dictionaries(
    {
        "prompt": prompts,
        "n": st.sampled_from([1, 1, 3]),
        "max_tokens": st.integers(0, 20),
        "prompt_logprobs": st.sampled_from([-1, -1, 0, 2]),
        "stop_token_ids": st.sampled_from(
            [np.zeros(0, np.int32), np.asarray([5, 11, 17], np.int32)]
        ),
        "cache_salt": st.sampled_from(["", "", "b"]),
        "tenant": st.sampled_from(["", "", "a"]),
        "priority": st.sampled_from([0, 1, 2, MASKED]),
    }
)


class EngineMachine(RuleBasedStateMachine):
    """Any order of requests, steps, aborts, preemptions and resets gives the tokens of the oracle."""

    @initialize(
        groups=st.sampled_from(sorted(GROUPS)),
        sizes=st.lists(st.integers(1, 5), min_size=3, max_size=3),
        num_pages=st.integers(26, 60),
        chunk=st.sampled_from([-1, 5, 16, 64]),
        depth=st.integers(1, 3),
        policy=st.sampled_from(["fcfs", "priority"]),
        caching=st.booleans(),
        drafts=st.integers(0, 4),
        has_draft_model=st.booleans(),
        whole_prompts=st.sampled_from([False, False, True]),
    )
    def start(
        self,
        groups: str,
        sizes: list[int],
        num_pages: int,
        chunk: int,
        depth: int,
        policy: str,
        caching: bool,
        drafts: int,
        has_draft_model: bool,
        whole_prompts: bool,
    ) -> None:
        self.world = World(
            groups=GROUPS[groups],
            blocks_per_page=tuple(sizes[: len(GROUPS[groups])]),
            num_pages=num_pages,
            chunk_size=chunk,
            depth=depth,
            policy=policy,
            prefix_caching=caching,
            num_drafts=drafts,
            has_draft_model=has_draft_model,
            whole_prompts=whole_prompts,
        )
        self.next_id = 0

    @rule(arrivals=st.lists(arrivals, min_size=1, max_size=5))
    def arrive(self, arrivals: list[dict[str, Any]]) -> None:
        for fields in arrivals:
            self.world.submit(request(self.next_id, **fields))
            self.next_id += fields["n"]

    @rule(num=st.integers(1, 12))
    def steps(self, num: int) -> None:
        for _ in range(num):
            self.world.step()

    @rule(which=st.integers(0, 1000))
    def abort(self, which: int) -> None:
        scheduler = self.world.scheduler
        live = [i for i in self.world.tokens if scheduler.sequences.get(i) is not None]
        if live:
            victim = live[which % len(live)]
            scheduler.abort([victim])
            assert scheduler.sequences.get(victim) is None

    @rule(which=st.integers(0, 1000))
    def preempt(self, which: int) -> None:
        slots = np.flatnonzero(self.world.scheduler.columns.sequence_id >= 0)
        if len(slots):
            self.world.scheduler.preempt(int(slots[which % len(slots)]))

    @rule()
    def reset(self) -> None:
        self.world.engine.reset_prefix_cache()

    @invariant()
    def every_block_is_in_one_state(self) -> None:
        if hasattr(self, "world"):
            audit(self.world.scheduler.kv.pool)

    @invariant()
    def every_token_is_right(self) -> None:
        if hasattr(self, "world"):
            for sequence_id in self.world.tokens:
                self.world.check(sequence_id)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        self.world.run(5000)
        for sequence_id in self.world.tokens:
            self.world.check(sequence_id)
            assert self.world.scheduler.sequences.get(sequence_id) is None
        self.world.step()
        counts = self.world.scheduler.kv.counts()
        assert (counts.held, counts.pending) == (0, 0), "something is held when idle"


TestAnyHistory = EngineMachine.TestCase
TestAnyHistory.settings = settings(
    max_examples=16,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("seed", with_release(range(0, 24, 4), range(24, 80, 4)))
def test_long_random_histories_keep_the_invariants(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hypothesis prefers short histories, so these are long and short of blocks."""
    for each in range(seed, seed + 4):
        rng = random.Random(each)
        monkeypatch.setattr(manager, "MAX_ENTRIES_AT_ONCE", rng.choice([0, 3, 4096]))
        monkeypatch.setattr(admission, "MAX_HIT_BLOCKS", rng.choice([1, 5, 16_384]))
        monkeypatch.setattr(scheduler, "MAX_RELEASED_BLOCKS", rng.choice([1, 5, 16_384]))
        groups = GROUPS[rng.choice(sorted(GROUPS))]
        world = World(
            groups=groups,
            blocks_per_page=tuple(rng.choice([1, 1, 3, 4]) for _ in groups),
            num_pages=rng.randint(26, 60),
            chunk_size=rng.choice([-1, 5, 16, 64]),
            depth=rng.randint(1, 3),
            policy=rng.choice(["fcfs", "priority"]),
            prefix_caching=rng.random() < 0.7,
            num_drafts=rng.randint(0, 4),
            has_draft_model=rng.random() < 0.5,
            whole_prompts=rng.random() < 0.3,
        )
        for sequence_id in range(0, 60, 3):
            base = rng.randint(0, 2) * 5
            prompt = [(base + i) % 60 for i in range(rng.randint(1, 22))] + [rng.randint(0, 59)]
            world.submit(
                request(
                    sequence_id,
                    prompt,
                    n=rng.choice([1, 1, 3]),
                    max_tokens=rng.randint(0, 20),
                    prompt_logprobs=rng.choice([-1, -1, 1]),
                    priority=rng.choice([0, 1, 2, MASKED]),
                )
            )
            for _ in range(rng.randint(0, 6)):
                world.step()
            if rng.random() < 0.2:
                world.scheduler.abort([rng.choice(list(world.tokens))])
            audit(world.scheduler.kv.pool)
        world.run()
        for sequence_id in world.tokens:
            world.check(sequence_id)
        world.step()
        counts = world.scheduler.kv.counts()
        assert (counts.held, counts.pending) == (0, 0)


def test_common_prefix_is_computed_once() -> None:
    world = World(num_pages=200, chunk_size=64, max_num_seqs=32, max_model_len=64)
    prefix = [(i * 7) % 60 for i in range(40)]
    for i in range(32):
        world.submit(request(i, [*prefix, i, 63 - i % 3], max_tokens=2))
    planned = 0
    forward = world.runner.forward

    def counting(plan: StepPlan) -> None:
        nonlocal planned
        planned += len(plan.token_ids)
        forward(plan)

    world.runner.forward = counting  # type: ignore[method-assign]
    world.run()
    assert planned == 40 + 32 * 2
    assert sorted(world.cached.values()) == [0] + [40] * 31
    for i in range(32):
        world.check(i)


def test_preemption_changes_no_token() -> None:
    world = World(num_pages=14, max_model_len=40, max_num_seqs=4, prefix_caching=False)
    for i in range(4):
        world.submit(request(i, [i, i + 1, i + 2], max_tokens=30))
    world.run()
    assert world.scheduler.num_preemptions > 0
    for i in range(4):
        world.check(i)
        assert world.finish[i] is FinishReason.LENGTH


def test_abort_takes_effect_at_once() -> None:
    world = World()
    world.submit(request(0, [1, 2, 3], max_tokens=30))
    for _ in range(4):
        world.step()
    slot = int(np.flatnonzero(world.scheduler.columns.sequence_id == 0)[0])
    world.scheduler.abort([0])
    assert world.scheduler.sequences.get(0) is None
    assert world.scheduler.columns.sequence_id[slot] == -1
    world.step()
    counts = world.scheduler.kv.counts()
    assert (counts.held, counts.pending) == (0, 0)
    assert not world.engine.has_work


def test_failed_step_ends_its_sequences() -> None:
    world = World(fail_at=frozenset({1}), chunk_size=64)
    prompt = list(range(20))
    world.submit(request(0, prompt))
    world.run()
    assert world.finish == {0: FinishReason.ERROR}
    world.submit(request(1, prompt))
    world.run()
    assert world.cached[1] == 0, "a block of the failed step was found in the cache"
    world.check(1)
    assert world.finish[1] is FinishReason.LENGTH


def test_higher_priority_runs_first() -> None:
    world = World(policy="priority", max_num_seqs=1)
    world.submit(request(0, [1, 2, 3], max_tokens=3, priority=2))
    world.submit(request(1, [1, 2, 4], max_tokens=3, priority=2))
    world.submit(request(2, [1, 2, 5], max_tokens=3, priority=0))
    order: list[int] = []
    while world.engine.has_work:
        world.step()
        order += [i for i in world.finish if i not in order]
    assert order[0] == 2


def test_full_queue_rejects() -> None:
    world = World(max_queued=3)
    for i in range(3):
        world.submit(request(i, [1, 2]))
    rejected = world.scheduler.submit(request(3, [1, 2]))
    assert rejected is not None
    assert rejected.reason == "queue_full"


@pytest.mark.parametrize("seed", with_release(range(0, 20, 20), range(20, 60, 20)))
def test_sequences_as_long_as_the_pool_finish(seed: int) -> None:
    for each in range(seed, seed + 20):
        rng = random.Random(each)
        groups = GROUPS[rng.choice(sorted(GROUPS))]
        world = World(
            groups=groups,
            blocks_per_page=tuple(rng.choice([1, 1, 3, 4]) for _ in groups),
            num_pages=rng.randint(5, 16),
            max_model_len=100,
            chunk_size=rng.choice([-1, 3, 5, 16, 64]),
            depth=rng.randint(1, 3),
            num_drafts=rng.choice([0, 0, 4]),
            has_draft_model=rng.random() < 0.5,
            whole_prompts=rng.random() < 0.3,
            max_num_seqs=rng.choice([1, 2, 4]),
        )
        most = min(world.scheduler.kv.max_sequence_len, world.max_model_len)
        for sequence_id in range(6):
            length = rng.choice([most, rng.randint(2, most)])
            prompt = [(rng.choice([0, 7]) + i * 3) % 60 for i in range(rng.randint(1, length - 1))]
            world.submit(request(sequence_id, prompt, max_tokens=length - len(prompt)))
            for _ in range(rng.randint(0, 8)):
                world.step()
        world.run(1000)
        for sequence_id in world.tokens:
            world.check(sequence_id)


@pytest.mark.parametrize("seed", range(3))
def test_sequences_beyond_their_windows_finish(seed: int) -> None:
    """The pool is as large as one sequence needs; its window group holds a window and a chunk."""
    rng = random.Random(seed)
    world = World(
        groups=GROUPS["full and window"],
        blocks_per_page=rng.choice([(1, 1), (3, 1), (1, 4)]),
        num_pages=rng.randint(24, 40),
        max_model_len=120,
        chunk_size=rng.choice([3, 5]),
        depth=1 + seed % 2,
        num_drafts=rng.choice([0, 4]),
        has_draft_model=seed == 2,
    )
    kv = world.scheduler.kv
    most = min(kv.max_sequence_len, world.max_model_len)
    assert kv.num_pages_needed(0, most) < kv.num_new_pages(*(np.asarray([n]) for n in (0, 0, most)))
    for sequence_id in range(3):
        prompt = [(i * 3) % 60 for i in range(rng.randint(most // 2, most - 1))]
        world.submit(request(sequence_id, prompt, max_tokens=most - len(prompt)))
    world.run()
    for sequence_id in world.tokens:
        world.check(sequence_id)


@pytest.mark.parametrize("groups", sorted(GROUPS))
def test_no_block_is_held_when_idle(groups: str) -> None:
    world = World(groups=GROUPS[groups], depth=1, chunk_size=64)
    world.submit(request(0, list(range(16)), max_tokens=1))
    while world.engine.has_work:
        world.step()
    counts = world.scheduler.kv.counts()
    assert (counts.held, counts.pending) == (0, 0)
