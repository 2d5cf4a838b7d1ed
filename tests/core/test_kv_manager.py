"""The KV manager: prefix hits, block tables and the prefix index."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_cache import BLOCK, GROUPS, NO_TOKENS, WINDOW, cache, ids

from tokenspeed_core.api.cache_groups import CacheGroupSpec
from tokenspeed_core.kv_cache.hashing import HashChain
from tokenspeed_core.kv_cache.lease import ABSENT
from tokenspeed_core.kv_cache.pool import PageCounts

every_group = pytest.mark.parametrize("groups", GROUPS.values(), ids=list(GROUPS))


# -- hash chains ------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 40), min_size=1, max_size=5))
def test_chain_can_be_extended_in_steps(cuts: list[int]) -> None:
    tokens = ids(40)
    grown = HashChain(BLOCK, "", 0)
    for cut in [*sorted(cuts), 40]:
        grown.extend(tokens[:cut])
    whole = HashChain(BLOCK, "", 0)
    whole.extend(tokens)
    assert grown.num_tokens == whole.num_tokens == 40
    assert [grown.at(n) for n in range(BLOCK, 41, BLOCK)] == [
        whole.at(n) for n in range(BLOCK, 41, BLOCK)
    ]


@given(st.integers(0, 39))
def test_token_changes_its_digest_and_later_ones(where: int) -> None:
    one, other = HashChain(BLOCK, "", 0), HashChain(BLOCK, "", 0)
    tokens = ids(40)
    one.extend(tokens)
    tokens[where] += 1
    other.extend(tokens)
    same = [one.at(n) == other.at(n) for n in range(BLOCK, 41, BLOCK)]
    assert same == [n <= where for n in range(BLOCK, 41, BLOCK)]


def test_fork_is_independent() -> None:
    chain = HashChain(BLOCK, "", 0)
    chain.extend(ids(8))
    fork = chain.fork()
    fork.extend(ids(16))
    assert (chain.num_tokens, fork.num_tokens) == (8, 16)
    assert fork.at(8) == chain.at(8)


# -- prefix hits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("known", "expected"), [(4, 0), (5, 4), (8, 4), (9, 8), (19, 16), (21, 20), (40, 20)]
)
def test_prefix_hit_has_full_blocks_and_leaves_one_token(known: int, expected: int) -> None:
    world = cache()
    world.fill(ids(20))
    assert world.hit(ids(known)) == expected


@every_group
def test_tenants_and_adapters_share_no_blocks(groups: tuple[CacheGroupSpec, ...]) -> None:
    world = cache(groups)
    world.fill(ids(20), salt="a")
    assert world.hit(ids(21), salt="a") == 20
    assert world.hit(ids(21), salt="b") == 0
    assert world.kv.match(world.chain(ids(21), "a", adapter_id=1), 21).num_tokens == 0


@every_group
def test_without_prefix_caching_nothing_is_cached(
    groups: tuple[CacheGroupSpec, ...],
) -> None:
    world = cache(groups, prefix_caching=False)
    world.fill(ids(20))
    assert world.hit(ids(20)) == 0
    assert world.kv.counts() == PageCounts(free=60, cached=0, held=0, pending=0)


def needed(group: CacheGroupSpec, length: int) -> set[int]:
    """Return the ends of the blocks that a group needs to resume at a length."""
    return {end for end in range(BLOCK, length + 1, BLOCK) if end > group.first_needed(length)}


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(GROUPS)), st.integers(1, 40), st.data())
def test_hit_is_longest_prefix_all_groups_can_resume(
    name: str,
    known: int,
    data: st.DataObject,
) -> None:
    groups, tokens = GROUPS[name], ids(40)
    world = cache(groups)
    kv, chain = world.kv, world.chain(tokens)
    world.fill(tokens)
    # Use all cached blocks but a drawn part, and take blocks until that part is evicted.
    stored = {
        (i, end): kv.match(chain, end + 1).entries[i].blocks[-1]
        for end in range(BLOCK, 41, BLOCK)
        for i in range(len(groups))
        if kv.match(chain, end + 1).num_tokens == end and end in needed(groups[i], end)
    }
    assert {i for i, _ in stored} == set(range(len(groups)))
    kept = set(stored) - data.draw(st.sets(st.sampled_from(sorted(stored)), max_size=6))
    for each in sorted(kept):
        kv.pool.share(stored[each])
        kv.pool.release([stored[each]])
    assert kv.pool.take(kv.pool.num_available - len(kept)) is not None

    def resumes(length: int) -> bool:
        return all(
            (i, end) in kept for i, group in enumerate(groups) for end in needed(group, length)
        )

    match = kv.match(chain, known)
    assert match.num_tokens == max((n for n in range(BLOCK, known, BLOCK) if resumes(n)), default=0)
    assert match.num_idle == sum(len(each.blocks) for each in match.entries)
    for i, group in enumerate(groups):
        ends = sorted(needed(group, match.num_tokens)) if match.num_tokens else []
        assert list(match.entries[i].blocks) == [stored[i, end] for end in ends]
        if ends:
            assert match.entries[i].start == ends[0] // BLOCK - 1


def test_match_does_not_change_state() -> None:
    world = cache(GROUPS["all"], num_pages=30)
    world.fill(ids(20))
    before = world.kv.counts()
    assert world.hit(ids(21)) == world.hit(ids(21)) == 20
    assert world.kv.counts() == before


def test_block_is_shared_once_planned() -> None:
    world = cache()
    with world.step():
        first, chain, _ = world.admit(ids(20))
        world.kv.extend(first, 0, 20)
        world.kv.cache_full_blocks(first, chain, 20, NO_TOKENS)
        second, _, num_hit = world.admit(ids(20))  # in the same step
    assert num_hit == 16
    assert second.tables[0] == first.tables[0][:4]


def test_partial_and_unknown_blocks_are_not_shared() -> None:
    world = cache()
    with world.step():
        lease, chain, _ = world.admit(ids(20))
        world.kv.extend(lease, 0, 40)
        world.kv.cache_full_blocks(lease, chain, 11, NO_TOKENS)
    assert world.hit(ids(20)) == 8
    world.kv.cache_full_blocks(lease, chain, 40, NO_TOKENS)  # only 20 tokens are in the chain
    assert world.hit(ids(40)) == 20


def test_first_of_two_equal_blocks_is_cached() -> None:
    world = cache()
    leases = []
    with world.step():
        for _ in range(2):
            lease = world.kv.acquire(world.kv.no_match())
            world.kv.extend(lease, 0, 20)
            leases.append(lease)
        for lease in leases:
            world.kv.cache_full_blocks(lease, world.chain(ids(20)), 20, NO_TOKENS)
    first, second = [list(lease.tables[0]) for lease in leases]
    for lease in leases:
        world.kv.release(lease)
    assert list(world.kv.match(world.chain(ids(21)), 21).entries[0].blocks) == first
    assert all(not world.kv.pool.is_idle(block) for block in second)
    assert world.kv.counts() == PageCounts(free=55, cached=5, held=0, pending=0)


def test_end_of_prompt_is_evicted_first() -> None:
    world = cache(num_pages=5)
    world.fill(ids(20))
    for left in (16, 12, 8, 4, 0):
        assert world.kv.pool.take(1) is not None
        assert world.hit(ids(21)) == left


# -- block tables ---------------------------------------------------------------------------------------


def test_blocks_before_the_window_are_released() -> None:
    world = cache((WINDOW,))
    with world.step():
        lease, _, _ = world.admit(ids(40))
        world.kv.extend(lease, 0, 40)
    held = list(lease.tables[0])
    world.kv.extend(lease, 21, 22)  # a query at 21 reads from 16 on
    assert lease.tables[0] == [ABSENT] * 4 + held[4:]
    world.kv.extend(lease, 20, 21)  # a query at 20 reads 15, which is gone
    assert world.kv.counts().held == 6


def test_extend_without_room_takes_nothing() -> None:
    world = cache(GROUPS["full and window"], num_pages=9)
    lease, _, _ = world.admit(ids(4))
    assert world.kv.extend(lease, 0, 16) is not None
    assert world.kv.extend(lease, 4, 20) is None
    assert world.kv.counts() == PageCounts(free=1, cached=0, held=8, pending=0)
    assert lease.capacity == 16
    assert [len(table) for table in lease.tables] == [4, 4]


def test_extend_returns_new_table_entries() -> None:
    world = cache(GROUPS["full and window"])
    lease, _, _ = world.admit(ids(4))
    first, second = world.kv.extend(lease, 0, 6), world.kv.extend(lease, 6, 13)
    assert first is not None
    assert second is not None
    for i, table in enumerate(lease.tables):
        assert [*first[i].blocks, *second[i].blocks] == table
        assert (first[i].start, second[i].start) == (0, 2)


@settings(deadline=None)
@given(
    st.sampled_from(sorted(GROUPS)),
    st.integers(1, 60),
    st.integers(0, 40),
    st.lists(st.integers(1, 60), max_size=4),
)
def test_sequence_takes_the_blocks_it_needs(
    name: str,
    known: int,
    num_before: int,
    cuts: list[int],
) -> None:
    world = cache(GROUPS[name], num_pages=120)
    if num_before:
        world.fill(ids(num_before))
    kv, chain = world.kv, world.chain(ids(known))
    match = kv.match(chain, known)
    needed, before = kv.num_pages_needed(match.num_tokens, known), kv.pool.num_available
    with world.step(retires=False):  # so that blocks before a window stay pending
        pass
    lease = kv.acquire(match)
    start = match.num_tokens
    for end in [*sorted(cut for cut in cuts if start < cut < known), known]:
        assert kv.extend(lease, start, end) is not None
        start = end
    assert before - kv.pool.num_available == needed + match.num_idle


@every_group
def test_longest_sequence_fills_the_pool(
    groups: tuple[CacheGroupSpec, ...],
) -> None:
    world = cache(groups, num_pages=20)
    most = world.kv.max_sequence_len
    lease = world.kv.acquire(world.kv.no_match())
    assert world.kv.extend(lease, 0, most) is not None
    assert world.kv.extend(lease, 0, most + 1) is None


def test_released_blocks_wait_for_steps_in_flight() -> None:
    world = cache(num_pages=5)
    with world.step(retires=False) as step:
        lease, _, _ = world.admit(ids(20))
        world.kv.extend(lease, 0, 20)
    world.kv.release(lease)
    other = world.kv.acquire(world.kv.no_match())
    assert world.kv.extend(other, 0, 4) is None
    world.kv.retire(step)
    assert world.kv.extend(other, 0, 4) is not None


# -- withdraw and reset -------------------------------------------------------------------


def test_withdraw_forgets_blocks_of_later_steps_too() -> None:
    world = cache()
    with world.step():
        lease, chain, _ = world.admit(ids(20))
        world.kv.extend(lease, 0, 8)
        world.kv.cache_full_blocks(lease, chain, 8, NO_TOKENS)
    for end in (12, 16):
        with world.step(retires=False):
            world.kv.extend(lease, end - BLOCK, end)
            world.kv.cache_full_blocks(lease, chain, end, NO_TOKENS)
    assert world.hit(ids(20)) == 16
    world.kv.withdraw(2)
    assert world.hit(ids(20)) == 8
    world.kv.release(lease)
    world.kv.retire(3)
    assert world.kv.counts() == PageCounts(free=58, cached=2, held=0, pending=0)


@every_group
def test_reset_empties_the_prefix_cache(
    groups: tuple[CacheGroupSpec, ...],
) -> None:
    world = cache(groups)
    world.fill(ids(20))
    assert world.hit(ids(21)) == 20
    world.kv.reset_prefix_cache()
    assert world.hit(ids(21)) == 0
    assert world.kv.counts() == PageCounts(free=60, cached=0, held=0, pending=0)


def test_reset_keeps_blocks_of_running_sequences() -> None:
    world = cache(GROUPS["full"])
    with world.step():
        lease, chain, _ = world.admit(ids(20))
        world.kv.extend(lease, 0, 20)
        world.kv.cache_full_blocks(lease, chain, 20, NO_TOKENS)
    held = [list(table) for table in lease.tables]
    world.kv.reset_prefix_cache()
    with world.step():
        pass
    assert lease.tables == held
    assert world.kv.counts().held == 5
    assert world.kv.match(world.chain(ids(21)), 21).num_tokens == 0
    world.kv.release(lease)
    assert world.kv.counts() == PageCounts(free=60, cached=0, held=0, pending=0)
