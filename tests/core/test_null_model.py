"""The whole scheduler, KV manager and step loop on the null model, against its sequential oracle."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from null_world import GROUPS, MASKED, NO_INT, World, audit, request

from tokenspeed_core.api.sampling import FinishReason
from tokenspeed_core.api.step import StepPlan
from tokenspeed_core.kv_cache.lease import ABSENT
from tokenspeed_core.scheduler.lifecycle import AwaitingInput, Sending

pytestmark = pytest.mark.slow

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
        "max_tokens": st.integers(1, 20),
        "stop_token_ids": st.sampled_from([NO_INT, np.asarray([5, 11, 17], np.int32)]),
        "cache_salt": st.sampled_from(["", "", "b"]),
        "priority": st.sampled_from([0, 1, 2, MASKED]),
        "awaits": st.sampled_from([False, False, True]),
    }
)


class NullMachine(RuleBasedStateMachine):
    """Any order of arrivals, steps, aborts, transfers and resets keeps every promise."""

    @initialize(
        groups=st.sampled_from(sorted(GROUPS)),
        num_blocks=st.integers(26, 60),
        chunk=st.sampled_from([-1, 5, 16, 64]),
        depth=st.integers(1, 3),
        policy=st.sampled_from(["fcfs", "priority"]),
        caching=st.booleans(),
        drafts=st.integers(0, 4),
        sends=st.booleans(),
    )
    def start(
        self,
        groups: str,
        num_blocks: int,
        chunk: int,
        depth: int,
        policy: str,
        caching: bool,
        drafts: int,
        sends: bool,
    ) -> None:
        self.world = World(
            groups=GROUPS[groups],
            num_blocks=num_blocks,
            chunk_size=chunk,
            depth=depth,
            policy=policy,
            prefix_caching=caching,
            num_drafts=drafts,
            sends=sends,
        )
        self.next_id = 0
        self.transfers: dict[int, tuple[list[int], np.ndarray]] = {}

    @rule(arrivals=st.lists(arrivals, min_size=1, max_size=5))
    def arrive(self, arrivals: list[dict[str, Any]]) -> None:
        for fields in arrivals:
            awaits = "a grammar" if fields["awaits"] else None
            fields = {name: value for name, value in fields.items() if name != "awaits"}
            self.world.submit(request(self.next_id, **fields), awaits)
            self.next_id += fields["n"]

    @rule(num=st.integers(1, 12))
    def steps(self, num: int) -> None:
        for _ in range(num):
            self.world.step()
            self._start_transfers()

    @rule(which=st.integers(0, 1000))
    def abort(self, which: int) -> None:
        live = [i for i in self.world.tokens if self.world.scheduler.roster.get(i) is not None]
        if live:
            victim = live[which % len(live)]
            was_sending = isinstance(self.world.scheduler.roster.get(victim), Sending)
            self.world.scheduler.abort([victim])
            assert was_sending or self.world.scheduler.roster.get(victim) is None

    @rule()
    def inputs_come(self) -> None:
        for sequence_id in list(self.world.tokens):
            if isinstance(self.world.scheduler.roster.get(sequence_id), AwaitingInput):
                self.world.scheduler.input_ready(sequence_id)

    @rule(which=st.integers(0, 1000))
    @precondition(lambda self: bool(self.transfers))
    def transfer_ends(self, which: int) -> None:
        sequence_id = sorted(self.transfers)[which % len(self.transfers)]
        self._end_transfer(sequence_id)

    @rule()
    def reset(self) -> None:
        self.world.engine.reset_prefix_cache()

    @invariant()
    def every_block_is_in_one_state(self) -> None:
        if hasattr(self, "world"):
            audit(self.world.scheduler.kv.pool)

    @invariant()
    def every_token_is_the_oracles(self) -> None:
        if hasattr(self, "world"):
            for sequence_id in self.world.tokens:
                self.world.check(sequence_id)

    def _sending(self) -> list[int]:
        return [
            i for i in self.world.tokens if isinstance(self.world.scheduler.roster.get(i), Sending)
        ]

    def _start_transfers(self) -> None:
        for sequence_id in self._sending():
            if sequence_id not in self.transfers:
                state = self.world.scheduler.roster.get(sequence_id)
                assert isinstance(state, Sending)
                blocks = [
                    block for table in state.blocks.tables for block in table if block != ABSENT
                ]
                self.transfers[sequence_id] = (blocks, self.world.runner.tokens[blocks].copy())

    def _end_transfer(self, sequence_id: int) -> None:
        blocks, before = self.transfers.pop(sequence_id)
        after = self.world.runner.tokens[blocks]
        written = (
            self.world.scheduler.num_in_flight > 0
        )  # a surplus token may still land in the last block
        assert written or np.array_equal(before[:-1], after[:-1]), (
            "a block changed while it was being sent"
        )
        self.world.scheduler.transfer_done(sequence_id)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        self.inputs_come()
        for _ in range(5000):
            self._start_transfers()
            for sequence_id in list(self.transfers):
                self._end_transfer(sequence_id)
            if not self.world.engine.has_work and not self._sending():
                break
            self.world.step()
        assert not self.world.engine.has_work, "sequences starve"
        for sequence_id in self.world.tokens:
            self.world.check(sequence_id)
            assert self.world.scheduler.roster.get(sequence_id) is None
        self.world.step()
        counts = self.world.scheduler.kv.counts()
        assert (counts.held, counts.pending) == (0, 0), "something is held when idle"


TestAnyHistoryEqualsTheOracle = NullMachine.TestCase
TestAnyHistoryEqualsTheOracle.settings = settings(
    max_examples=200,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("seed", range(0, 80, 4))
def test_long_random_histories_equal_the_oracle(seed: int) -> None:
    """Beside Hypothesis, which prefers short histories: long ones under pressure, four to a case."""
    for each in range(seed, seed + 4):
        rng = random.Random(each)
        world = World(
            groups=GROUPS[rng.choice(sorted(GROUPS))],
            num_blocks=rng.randint(26, 60),
            chunk_size=rng.choice([-1, 5, 16, 64]),
            depth=rng.randint(1, 3),
            policy=rng.choice(["fcfs", "priority"]),
            prefix_caching=rng.random() < 0.7,
            num_drafts=rng.randint(0, 4),
        )
        for sequence_id in range(0, 60, 3):
            base = rng.randint(0, 2) * 5
            prompt = [(base + i) % 60 for i in range(rng.randint(1, 22))] + [rng.randint(0, 59)]
            world.submit(
                request(
                    sequence_id,
                    prompt,
                    n=rng.choice([1, 1, 3]),
                    max_tokens=rng.randint(1, 20),
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


def test_requests_that_arrive_together_compute_their_common_prefix_once() -> None:
    world = World(num_blocks=200, chunk_size=64, max_num_seqs=32, max_model_len=64)
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


def test_a_tiny_pool_preempts_and_changes_no_token() -> None:
    world = World(num_blocks=14, max_model_len=40, max_num_seqs=4, prefix_caching=False)
    for i in range(4):
        world.submit(request(i, [i, i + 1, i + 2], max_tokens=30))
    world.run()
    assert world.scheduler.roster.num_preemptions > 0
    for i in range(4):
        world.check(i)
        assert world.finish[i] is FinishReason.LENGTH


def test_an_aborted_sequence_is_planned_no_more_and_frees_its_blocks_a_step_later() -> None:
    world = World()
    world.submit(request(0, [1, 2, 3], max_tokens=30))
    for _ in range(4):
        world.step()
    slot = int(np.flatnonzero(world.scheduler.columns.sequence_id == 0)[0])
    world.scheduler.abort([0])
    assert world.scheduler.roster.get(0) is None
    assert world.scheduler.columns.sequence_id[slot] == -1
    world.step()
    counts = world.scheduler.kv.counts()
    assert (counts.held, counts.pending) == (0, 0)
    assert not world.engine.has_work


def test_a_failed_step_ends_its_sequences_and_withdraws_their_blocks() -> None:
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


def test_a_replica_with_nothing_to_do_runs_the_group_steps_empty() -> None:
    busy, idle = World(), World()
    busy.submit(request(0, [1, 2, 3, 4], max_tokens=5))
    for _ in range(40):
        drafts = [world.scheduler.plan() for world in (busy, idle)]
        if drafts[0] is None and not busy.scheduler.num_in_flight:
            break
        counts = np.asarray([draft.num_tokens if draft else 0 for draft in drafts], np.int32)
        for world, draft in zip((busy, idle), drafts, strict=True):
            world.take(world.engine.launch(draft or world.scheduler.empty(), counts))
            world.take([world.engine.collect()])
    busy.check(0)
    assert busy.finish == {0: FinishReason.LENGTH}
    assert len(idle.runner.group_counts) == len(busy.runner.group_counts) >= 5
    assert all(
        np.array_equal(a, b)
        for a, b in zip(busy.runner.group_counts, idle.runner.group_counts, strict=True)
    )


def test_higher_priority_goes_first_and_takes_blocks_from_lower() -> None:
    world = World(policy="priority", max_num_seqs=1)
    world.submit(request(0, [1, 2, 3], max_tokens=3, priority=2))
    world.submit(request(1, [1, 2, 4], max_tokens=3, priority=2))
    world.submit(request(2, [1, 2, 5], max_tokens=3, priority=0))
    order: list[int] = []
    while world.engine.has_work:
        world.step()
        order += [i for i in world.finish if i not in order]
    assert order[0] == 2


@pytest.mark.parametrize(
    ("prompt", "most", "reason"),
    [
        ([], 4, "bad_request"),
        ([64], 4, "bad_request"),
        ([-1], 4, "bad_request"),
        ([1] * 40, 20, "too_long"),
    ],
)
def test_a_request_that_can_never_run_is_refused_at_once(
    prompt: list[int], most: int, reason: str
) -> None:
    refused = World().scheduler.submit(request(7, prompt, max_tokens=most))
    assert refused is not None
    assert (refused.request_id, refused.reason) == (7, reason)


def test_a_full_queue_refuses() -> None:
    world = World(max_queued=3)
    for i in range(3):
        world.submit(request(i, [1, 2]))
    refused = world.scheduler.submit(request(3, [1, 2]))
    assert refused is not None
    assert refused.reason == "queue_full"


@pytest.mark.parametrize("finds_a_hit", [True, False])
@pytest.mark.parametrize("num_before", [4, 8, 16, 20])
@pytest.mark.parametrize("groups", ["full and state", "window and state"])
def test_a_checkpoint_never_keeps_out_a_sequence_that_needs_the_whole_pool(
    groups: str,
    num_before: int,
    finds_a_hit: bool,
) -> None:
    world = World(groups=GROUPS[groups], num_blocks=12, max_model_len=100)
    longest = [(i * 3) % 60 for i in range(world.scheduler.kv.max_tokens_in_pool() - 1)]
    world.submit(
        request(
            0, longest[:num_before] if finds_a_hit else longest[::-1][:num_before], max_tokens=1
        )
    )
    if finds_a_hit:
        world.run()
    world.submit(request(1, longest, max_tokens=1))
    world.run(200)
    world.check(1)
    assert world.finish[1] is FinishReason.LENGTH


@pytest.mark.parametrize("seed", range(0, 60, 20))
def test_sequences_as_long_as_the_pool_all_end(seed: int) -> None:
    for each in range(seed, seed + 20):
        rng = random.Random(each)
        world = World(
            groups=GROUPS[rng.choice(sorted(GROUPS))],
            num_blocks=rng.randint(5, 16),
            max_model_len=100,
            chunk_size=rng.choice([-1, 3, 5, 16, 64]),
            depth=rng.randint(1, 3),
            num_drafts=rng.choice([0, 0, 4]),
            max_num_seqs=rng.choice([1, 2, 4]),
        )
        most = min(world.scheduler.kv.max_tokens_in_pool(), world.max_model_len)
        for sequence_id in range(6):
            length = rng.choice([most, rng.randint(2, most)])
            prompt = [(rng.choice([0, 7]) + i * 3) % 60 for i in range(rng.randint(1, length - 1))]
            world.submit(request(sequence_id, prompt, max_tokens=length - len(prompt)))
            for _ in range(rng.randint(0, 8)):
                world.step()
        world.run(1000)
        for sequence_id in world.tokens:
            world.check(sequence_id)


@pytest.mark.parametrize("num_blocks", [1, 3])
def test_sequences_that_keep_states_alone_run_when_these_fill_the_pool(num_blocks: int) -> None:
    world = World(groups=GROUPS["state"], num_blocks=num_blocks, max_num_seqs=num_blocks)
    for sequence_id in range(num_blocks + 1):
        world.submit(
            request(sequence_id, [(sequence_id + i) % 60 for i in range(10)], max_tokens=9)
        )
    world.run(300)
    for sequence_id in range(num_blocks + 1):
        world.check(sequence_id)
        assert world.finish[sequence_id] is FinishReason.LENGTH


@pytest.mark.parametrize("groups", sorted(GROUPS))
def test_nothing_is_held_once_the_last_step_is_collected(groups: str) -> None:
    world = World(groups=GROUPS[groups], depth=1, chunk_size=64)
    world.submit(request(0, list(range(16)), max_tokens=1))
    while world.engine.has_work:
        world.step()
    counts = world.scheduler.kv.counts()
    assert (counts.held, counts.pending) == (0, 0)
