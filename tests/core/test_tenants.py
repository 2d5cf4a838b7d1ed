"""Tenants take turns in the queue, have separate limits, and share no KV blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engine_world import World
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenspeed_testing.requests import request

from tokenspeed_core.scheduler.policy import POLICIES
from tokenspeed_core.scheduler.waiting_queue import QueueEntry, WaitingQueue

PROMPT = list(range(1, 17))


def entries(queue: WaitingQueue) -> list[int]:
    """Admit everything; return the sequence ids in their order."""
    order = []
    while queue.first() is not None:
        order.append(queue.pop(is_turn=True).sequence_id)
    return order


def test_tenant_with_one_request_does_not_wait_for_many() -> None:
    queue = WaitingQueue(POLICIES["fcfs"])
    for i in range(100):
        queue.put_back(QueueEntry((0, i), i, "busy"))
    queue.put_back(QueueEntry((0, 100), 100, "rare"))
    assert 100 in entries(queue)[:2]


def test_late_tenant_gets_no_turns_for_the_past() -> None:
    queue = WaitingQueue(POLICIES["fcfs"])
    for i in range(60):
        queue.put_back(QueueEntry((0, i), i, "first"))
    for _ in range(20):
        queue.pop(is_turn=True)
    for i in range(60, 90):
        queue.put_back(QueueEntry((0, i), i, "late"))
    order = entries(queue)
    assert 18 <= sum(i < 60 for i in order[:40]) <= 22


def test_priority_comes_before_turns() -> None:
    queue = WaitingQueue(POLICIES["priority"])
    for i in range(5):
        queue.put_back(QueueEntry((1, i), i, "a"))
        queue.put_back(QueueEntry((0, i), 10 + i, "b"))
    assert entries(queue) == [10, 11, 12, 13, 14, 0, 1, 2, 3, 4]


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.sampled_from("abc"))))
def test_queue_keeps_every_entry_and_each_tenants_order(
    given_entries: list[tuple[int, int, str]],
) -> None:
    queue = WaitingQueue(POLICIES["priority"])
    for i, (rank, arrival, tenant) in enumerate(given_entries):
        queue.put_back(QueueEntry((rank, arrival), i, tenant))
    order = entries(queue)
    assert sorted(order) == list(range(len(given_entries)))
    for tenant in "abc":
        own = [i for i in order if given_entries[i][2] == tenant]
        assert own == sorted(own, key=lambda i: (*given_entries[i][:2], i))


def test_short_request_overtakes_another_tenants_queue() -> None:
    world = World(max_num_seqs=2)
    for i in range(1, 21):
        world.submit(request(i, PROMPT, max_tokens=4, tenant="busy"))
    world.submit(request(100, PROMPT, max_tokens=1, tenant="rare"))
    while 100 not in world.finish:
        world.step()
    assert len(world.finish) < 6


def running(world: World) -> dict[str, int]:
    """Return the number of running sequences of each tenant."""
    sequences = world.scheduler.sequences
    return {tenant: sequences.num_running_of(tenant) for tenant in "abc"}


def test_late_tenant_takes_slots_from_the_busiest() -> None:
    world = World(max_num_seqs=6, num_pages=200, max_model_len=100)
    for i in range(1, 13):
        world.submit(request(i, PROMPT, max_tokens=60, tenant="a"))
    for _ in range(5):
        world.step()
    assert running(world) == {"a": 6, "b": 0, "c": 0}
    for i in range(20, 26):
        world.submit(request(i, PROMPT, max_tokens=60, tenant="b"))
    for _ in range(12):
        world.step()
    assert running(world) == {"a": 3, "b": 3, "c": 0}
    world.submit(request(30, PROMPT, max_tokens=1, tenant="c"))
    for _ in range(8):
        world.step()
    assert 30 in world.finish
    num_preemptions = world.scheduler.num_preemptions
    for _ in range(10):
        world.step()
    assert sum(running(world).values()) == 6
    assert world.scheduler.num_preemptions <= num_preemptions + 1, "shares are stable"
    world.run()
    assert len(world.finish) == 19


def test_one_tenant_is_never_preempted_for_itself() -> None:
    world = World(max_num_seqs=2, num_pages=200)
    for i in range(1, 11):
        world.submit(request(i, PROMPT, max_tokens=9, tenant="a"))
    world.run()
    assert world.scheduler.num_preemptions == 0


def test_higher_priority_sequences_keep_their_slots() -> None:
    world = World(max_num_seqs=4, num_pages=200, policy="priority")
    for i in range(1, 5):
        world.submit(request(i, PROMPT, max_tokens=30, tenant="a", priority=0))
    for _ in range(4):
        world.step()
    world.submit(request(9, PROMPT, max_tokens=2, tenant="b", priority=5))
    world.run()
    assert world.scheduler.num_preemptions == 0
    assert len(world.finish) == 5


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(1, 30), st.integers(0, 6)),
        min_size=1,
        max_size=25,
    ),
    st.integers(1, 5),
    st.sampled_from([12, 60]),
)
def test_every_sequence_of_every_tenant_ends(
    submitted: list[tuple[str, int, int]], max_num_seqs: int, num_pages: int
) -> None:
    world = World(max_num_seqs=max_num_seqs, num_pages=num_pages)
    for i, (tenant, max_tokens, num_steps) in enumerate(submitted, 1):
        world.submit(request(i, PROMPT, max_tokens=max_tokens, tenant=tenant))
        for _ in range(num_steps):
            world.step()
    world.run()
    assert len(world.finish) == len(submitted)
    for i, (_, max_tokens, _) in enumerate(submitted, 1):
        world.check(i)
        assert len(world.tokens[i]) == max_tokens
    assert running(world) == {"a": 0, "b": 0, "c": 0}


def test_tenants_share_no_cached_prefix() -> None:
    world = World()
    for i, tenant in ((1, "a"), (2, "b"), (3, "a"), (4, "")):
        world.submit(request(i, PROMPT, max_tokens=2, tenant=tenant))
        world.run()
    assert [world.cached[i] > 0 for i in (1, 2, 3, 4)] == [False, False, True, False]


def limited(world: World, **limits: int) -> World:
    world.scheduler.limits = replace(world.scheduler.limits, **limits)  # type: ignore[arg-type]
    return world


def test_waiting_prompt_tokens_are_bounded() -> None:
    world = limited(World(), max_queued_tokens=40)
    reasons = [world.scheduler.submit(request(i, PROMPT)) for i in range(1, 5)]
    assert [each and each.reason for each in reasons] == [None, None, "queue_full", "queue_full"]
    for i in (1, 2):
        world.scheduler.abort([i])
    assert world.scheduler.sequences.num_waiting_tokens == 0
    assert world.scheduler.submit(request(5, PROMPT, n=3)) is None  # an empty queue takes any


def test_unfinished_sequences_of_a_tenant_are_bounded() -> None:
    world = limited(World(), max_live_per_tenant=2)
    submit = world.scheduler.submit
    assert submit(request(1, PROMPT, n=2, tenant="a")) is None
    refused = submit(request(3, PROMPT, tenant="a"))
    assert refused is not None
    assert refused.reason == "tenant_limit"
    assert submit(request(4, PROMPT, tenant="b")) is None
    never = submit(request(5, PROMPT, n=3, tenant="c"))
    assert never is not None
    assert never.reason == "bad_request"
    world.scheduler.abort([1])
    assert submit(request(6, PROMPT, tenant="a")) is None


@pytest.mark.parametrize("num_pages", [12, 40])
def test_count_of_waiting_tokens_survives_preemption(num_pages: int) -> None:
    world = World(num_pages=num_pages)
    for i in range(1, 7):
        world.submit(request(i, PROMPT, max_tokens=20, tenant="ab"[i % 2]))
    world.run()
    assert world.scheduler.sequences.num_waiting_tokens == 0
    assert world.scheduler.sequences.num_of_tenant("a") == 0
