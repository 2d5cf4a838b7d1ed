"""Which plan carries which copy of a state, and what becomes of blocks when a step fails or all is reset."""

from __future__ import annotations

import pytest
from kv_cache import BLOCK, FULL, GROUPS, STATE, cache, ids

from tokenspeed_core.api.cache_groups import CacheGroupSpec, RecurrentState
from tokenspeed_core.kv_cache.pool import BlockCounts

every_group = pytest.mark.parametrize("groups", GROUPS.values(), ids=list(GROUPS))


# -- states and their copies ----------------------------------------------------------------------


def test_a_checkpoint_is_copied_by_the_plan_after_the_one_that_computes_it_and_found_from_then_on() -> (
    None
):
    world = cache((STATE,))
    with world.step() as first:
        lease, chain, _ = world.admit(ids(9))
        world.kv.cache_full_blocks(lease, chain, 8, is_exact=True)
        assert world.kv.copies() == [([], [])]
    assert world.hit(ids(9)) == 0, "nothing was copied yet"
    with world.step() as second:
        assert world.hit(ids(9)) == 0
    (working,) = lease.tables[0]
    assert world.copies[first] == [([], [])]
    ((sources, (checkpoint,)),) = world.copies[second]
    assert sources == [working] != [checkpoint]
    assert world.hit(ids(9)) == 8
    with world.step() as third:
        pass
    assert world.copies[third] == [([], [])]


@pytest.mark.parametrize(
    ("num_computed", "is_exact"), [(8, False), (7, True), (9, True), (0, True)]
)
def test_no_checkpoint_is_taken_of_a_state_that_does_not_stand_where_a_block_ends(
    num_computed: int,
    is_exact: bool,
) -> None:
    world = cache((STATE,))
    with world.step():
        lease, chain, _ = world.admit(ids(20))
        world.kv.cache_full_blocks(lease, chain, num_computed, is_exact=is_exact)
    with world.step() as step:
        pass
    assert world.copies[step] == [([], [])]


def test_a_hit_on_a_state_is_copied_by_the_plan_that_admits_and_held_no_longer() -> None:
    world = cache((STATE,))
    world.fill(ids(8))
    ((_, checkpoint),) = world.kv.match(world.chain(ids(9)), 9).blocks[0]
    with world.step() as step:
        lease, _, num_hit = world.admit(ids(9))
        assert num_hit == 8
        assert not world.kv.pool.is_idle(checkpoint), "it must not be evicted before it is copied"
    assert world.copies[step] == [([checkpoint], lease.tables[0])]
    assert world.kv.pool.is_idle(checkpoint)
    assert lease.tables[0] != [checkpoint], "two sequences would write one state"


def test_a_state_is_checkpointed_once() -> None:
    world = cache((STATE,))
    world.fill(ids(8))
    with world.step():
        lease = world.kv.acquire(world.kv.no_match())
        assert lease is not None
        world.kv.cache_full_blocks(lease, world.chain(ids(8)), 8, is_exact=True)
    with world.step() as step:
        pass
    assert world.copies[step] == [([], [])]
    assert world.kv.counts().held == 1


def test_without_room_for_a_checkpoint_there_is_none() -> None:
    world = cache((STATE,), num_blocks=1)
    with world.step():
        lease, chain, _ = world.admit(ids(8))
        world.kv.cache_full_blocks(lease, chain, 8, is_exact=True)
    with world.step() as step:
        pass
    assert world.copies[step] == [([], [])]


def test_copies_of_several_groups_come_apart() -> None:
    world = cache((STATE, FULL, RecurrentState("other", 1, 8)))
    with world.step():
        lease, chain, _ = world.admit(ids(4))
        world.kv.extend(lease, 0, 4)
        world.kv.cache_full_blocks(lease, chain, 4, is_exact=True)
    with world.step() as step:
        pass
    sources = [src for src, _ in world.copies[step]]
    assert sources == [lease.tables[0], [], lease.tables[2]]


def test_copies_that_nobody_will_carry_are_given_up() -> None:
    world = cache((STATE,))
    with world.step():
        lease, chain, _ = world.admit(ids(8))
        world.kv.cache_full_blocks(lease, chain, 8, is_exact=True)
    world.kv.release(lease)
    assert world.kv.counts().held == 1
    world.kv.drop_copies()
    assert world.kv.counts() == BlockCounts(free=60, cached=0, held=0, pending=0)
    with world.step() as step:
        pass
    assert world.copies[step] == [([], [])]


# -- withdrawing and forgetting -------------------------------------------------------------------


def test_a_failed_step_takes_its_blocks_and_those_after_it_out_of_the_cache() -> None:
    world = cache()
    with world.step():
        lease, chain, _ = world.admit(ids(20))
        world.kv.extend(lease, 0, 8)
        world.kv.cache_full_blocks(lease, chain, 8, is_exact=True)
    for end in (12, 16):
        with world.step(retires=False):
            world.kv.extend(lease, end - BLOCK, end)
            world.kv.cache_full_blocks(lease, chain, end, is_exact=True)
    assert world.hit(ids(20)) == 16
    world.kv.withdraw(2)
    assert world.hit(ids(20)) == 8
    world.kv.release(lease)
    world.kv.retire(3)
    assert world.kv.counts() == BlockCounts(free=58, cached=2, held=0, pending=0)


def test_a_failed_step_gives_up_the_checkpoints_it_would_have_made() -> None:
    world = cache((STATE,))
    with world.step(retires=False):
        lease, chain, _ = world.admit(ids(20))
        world.kv.cache_full_blocks(lease, chain, 8, is_exact=True)
    with world.step(retires=False):  # it copies the state at 8, and computes the one at 12
        world.kv.cache_full_blocks(lease, chain, 12, is_exact=True)
    assert world.hit(ids(20)) == 8
    world.kv.withdraw(1)
    world.kv.release(lease)
    world.kv.retire(2)
    assert world.hit(ids(20)) == 0
    assert world.kv.counts() == BlockCounts(free=60, cached=0, held=0, pending=0)


@every_group
def test_after_a_reset_nothing_is_found_and_nothing_stays_cached(
    groups: tuple[CacheGroupSpec, ...],
) -> None:
    world = cache(groups)
    world.fill(ids(20))
    assert world.hit(ids(21)) == 20
    world.kv.reset()
    assert world.hit(ids(21)) == 0
    assert world.kv.counts() == BlockCounts(free=60, cached=0, held=0, pending=0)


def test_a_reset_leaves_running_sequences_their_blocks() -> None:
    world = cache(GROUPS["full and state"])
    with world.step():
        lease, chain, _ = world.admit(ids(20))
        world.kv.extend(lease, 0, 20)
        world.kv.cache_full_blocks(
            lease, chain, 20, is_exact=True
        )  # with a checkpoint that waits for the next plan
    held = [list(table) for table in lease.tables]
    world.kv.reset()
    with world.step():
        pass
    assert lease.tables == held
    assert world.kv.counts().held == 6
    assert world.kv.match(world.chain(ids(21)), 21).num_tokens == 0
    world.kv.release(lease)
    assert world.kv.counts() == BlockCounts(free=60, cached=0, held=0, pending=0)


def test_a_reset_between_admission_and_launch_leaves_the_hits_copy() -> None:
    world = cache((STATE,))
    world.fill(ids(8))
    with world.step() as step:
        lease, _, _ = world.admit(ids(9))
        world.kv.reset()
    assert [dst for _, dst in world.copies[step]] == [lease.tables[0]]
