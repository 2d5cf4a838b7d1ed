"""What a prefix hit is, what becomes shareable when, and how block tables grow."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_cache import BLOCK, GROUPS, WINDOW, cache, ids

from tokenspeed_core.api.cache_groups import CacheGroupSpec
from tokenspeed_core.kv_cache.hashing import HashChain
from tokenspeed_core.kv_cache.lease import ABSENT
from tokenspeed_core.kv_cache.pool import BlockCounts

every_group = pytest.mark.parametrize("groups", GROUPS.values(), ids=list(GROUPS))


# -- the chain ------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 40), min_size=1, max_size=5))
def test_a_chain_extended_bit_by_bit_is_the_chain_of_the_whole(cuts: list[int]) -> None:
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
def test_a_token_changes_its_own_blocks_digest_and_all_later_ones(where: int) -> None:
    one, other = HashChain(BLOCK, "", 0), HashChain(BLOCK, "", 0)
    tokens = ids(40)
    one.extend(tokens)
    tokens[where] += 1
    other.extend(tokens)
    same = [one.at(n) == other.at(n) for n in range(BLOCK, 41, BLOCK)]
    assert same == [n <= where for n in range(BLOCK, 41, BLOCK)]


def test_a_fork_extends_by_itself() -> None:
    chain = HashChain(BLOCK, "", 0)
    chain.extend(ids(8))
    fork = chain.fork()
    fork.extend(ids(16))
    assert (chain.num_tokens, fork.num_tokens) == (8, 16)
    assert fork.at(8) == chain.at(8)


# -- hits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("known", "expected"), [(4, 0), (5, 4), (8, 4), (9, 8), (19, 16), (21, 20), (40, 20)]
)
def test_a_hit_is_whole_blocks_and_leaves_a_token_to_compute(known: int, expected: int) -> None:
    world = cache()
    world.fill(ids(20))
    assert world.hit(ids(known)) == expected


@every_group
def test_tenants_and_adapters_share_no_block(groups: tuple[CacheGroupSpec, ...]) -> None:
    world = cache(groups)
    world.fill(ids(20), salt="a")
    assert world.hit(ids(21), salt="a") == 20
    assert world.hit(ids(21), salt="b") == 0
    assert world.kv.match(world.chain(ids(21), "a", adapter_id=1), 21).num_tokens == 0


@every_group
def test_without_prefix_caching_nothing_is_found_and_nothing_kept(
    groups: tuple[CacheGroupSpec, ...],
) -> None:
    world = cache(groups, prefix_caching=False)
    world.fill(ids(20))
    assert world.hit(ids(20)) == 0
    assert world.kv.counts() == BlockCounts(free=60, cached=0, held=0, pending=0)


def needed(group: CacheGroupSpec, length: int) -> set[int]:
    """Return the ends of the blocks without which a group cannot go on at a length."""
    if group.is_recurrent:
        return {length}
    return {end for end in range(BLOCK, length + 1, BLOCK) if end > group.first_needed(length)}


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(GROUPS)), st.integers(1, 40), st.data())
def test_a_hit_is_the_longest_prefix_at_which_every_group_can_resume(
    name: str,
    known: int,
    data: st.DataObject,
) -> None:
    groups, tokens = GROUPS[name], ids(40)
    world = cache(groups)
    kv, chain = world.kv, world.chain(tokens)
    world.fill(tokens)
    # Whatever is in the cache now: let all but a drawn part be used last, and take blocks until that part is evicted.
    stored = {
        (i, end): dict(kv.match(chain, end + 1).blocks[i])[end // BLOCK - 1]
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
    assert match.num_idle == sum(map(len, match.blocks))
    for i, group in enumerate(groups):
        ends = sorted(needed(group, match.num_tokens)) if match.num_tokens else []
        assert list(match.blocks[i]) == [(end // BLOCK - 1, stored[i, end]) for end in ends]


def test_asking_for_a_hit_changes_nothing() -> None:
    world = cache(GROUPS["all"], num_blocks=30)
    world.fill(ids(20))
    before = world.kv.counts()
    assert world.hit(ids(21)) == world.hit(ids(21)) == 20
    assert world.kv.counts() == before


def test_a_block_is_shareable_once_planned() -> None:
    world = cache()
    with world.step():
        first, chain, _ = world.admit(ids(20))
        world.kv.extend(first, 0, 20)
        world.kv.cache_full_blocks(first, chain, 20, is_exact=True)
        second, _, num_hit = world.admit(ids(20))  # in the same step
    assert num_hit == 16
    assert second.tables[0] == first.tables[0][:4]


def test_blocks_that_are_not_full_or_not_known_yet_are_not_shared() -> None:
    world = cache()
    with world.step():
        lease, chain, _ = world.admit(ids(20))
        world.kv.extend(lease, 0, 40)
        world.kv.cache_full_blocks(lease, chain, 11, is_exact=True)
    assert world.hit(ids(20)) == 8
    world.kv.cache_full_blocks(lease, chain, 40, is_exact=False)  # only 20 tokens are in the chain
    assert world.hit(ids(40)) == 20


def test_of_two_copies_of_a_block_the_first_is_kept() -> None:
    world = cache()
    leases = []
    with world.step():
        for _ in range(2):
            lease = world.kv.acquire(world.kv.no_match())
            assert lease is not None
            world.kv.extend(lease, 0, 20)
            leases.append(lease)
        for lease in leases:
            world.kv.cache_full_blocks(lease, world.chain(ids(20)), 20, is_exact=True)
    first, second = [list(lease.tables[0]) for lease in leases]
    for lease in leases:
        world.kv.release(lease)
    assert [block for _, block in world.kv.match(world.chain(ids(21)), 21).blocks[0]] == first
    assert all(not world.kv.pool.is_idle(block) for block in second)
    assert world.kv.counts() == BlockCounts(free=55, cached=5, held=0, pending=0)


def test_the_ends_of_prompts_are_evicted_before_their_beginnings() -> None:
    world = cache(num_blocks=5)
    world.fill(ids(20))
    for left in (16, 12, 8, 4, 0):
        assert world.kv.pool.take(1) is not None
        assert world.hit(ids(21)) == left


# -- taking ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["full and state", "window and state", "all"])
def test_a_hit_is_not_evicted_by_the_blocks_taken_beside_it(name: str) -> None:
    world = cache(GROUPS[name], num_blocks=30)
    world.fill(ids(20))
    kv = world.kv
    match = kv.match(world.chain(ids(21)), 21)
    hit = [block for blocks in match.blocks for _, block in blocks]
    kv.pool.take(kv.counts().free)  # only cached blocks are left to take,
    for block in range(kv.pool.num_blocks):
        if kv.pool.is_idle(block) and block not in hit:
            kv.pool.share(block)
            kv.pool.release([block])  # and those of the hit are the longest unused
    assert match.num_tokens == 20
    with world.step():
        lease = kv.acquire(match)
        assert lease is not None
        assert not set(hit) & {
            lease.tables[i][0] for i, group in enumerate(kv.groups) if group.is_recurrent
        }
        assert kv.match(world.chain(ids(21)), 21).blocks == match.blocks
    assert world.hit(ids(21)) == 20


@every_group
def test_without_room_for_a_hit_nothing_is_taken(groups: tuple[CacheGroupSpec, ...]) -> None:
    world = cache(groups, num_blocks=30)
    world.fill(ids(20))
    kv = world.kv
    match = kv.match(world.chain(ids(21)), 21)
    kv.pool.take(kv.counts().free)
    hit = [block for blocks in match.blocks for _, block in blocks]
    while kv.pool.num_available > len(hit):  # what is left are the hit's blocks, all idle
        for block in hit:
            kv.pool.share(block)
            kv.pool.release([block])
        kv.pool.take(1)
    before = kv.counts()
    lease = kv.acquire(match)
    assert (lease is None) == kv.has_recurrent
    if lease is None:
        assert kv.counts() == before


def test_blocks_that_a_window_has_passed_are_given_back() -> None:
    world = cache((WINDOW,))
    with world.step():
        lease, _, _ = world.admit(ids(40))
        world.kv.extend(lease, 0, 40)
    held = list(lease.tables[0])
    world.kv.extend(lease, 21, 22)  # a query at 21 reads from 16 on
    assert lease.tables[0] == [ABSENT] * 4 + held[4:]
    world.kv.extend(
        lease, 20, 21
    )  # one at 20 reads 15: what is gone is gone, and nothing is given back twice
    assert world.kv.counts().held == 6


def test_an_extension_without_room_takes_nothing() -> None:
    world = cache(GROUPS["full and window"], num_blocks=9)
    lease, _, _ = world.admit(ids(4))
    assert world.kv.extend(lease, 0, 16) is not None
    assert world.kv.extend(lease, 4, 20) is None
    assert world.kv.counts() == BlockCounts(free=1, cached=0, held=8, pending=0)
    assert lease.capacity == 16
    assert [len(table) for table in lease.tables] == [4, 4]


def test_an_extension_tells_the_new_entries_of_the_tables() -> None:
    world = cache(GROUPS["all"])
    lease, _, _ = world.admit(ids(4))
    first, second = world.kv.extend(lease, 0, 6), world.kv.extend(lease, 6, 13)
    assert first is not None
    assert second is not None
    for i, table in enumerate(lease.tables[:2]):
        assert first[i] + second[i] == tuple(enumerate(table))
        assert [index for index, _ in second[i]] == [2, 3]
    assert first[2] == second[2] == ()


@settings(deadline=None)
@given(
    st.sampled_from(sorted(GROUPS)),
    st.integers(1, 60),
    st.integers(0, 40),
    st.lists(st.integers(1, 60), max_size=4),
)
def test_what_a_sequence_takes_is_what_was_said_to_be_needed(
    name: str,
    known: int,
    num_before: int,
    cuts: list[int],
) -> None:
    world = cache(GROUPS[name], num_blocks=120)
    if num_before:
        world.fill(ids(num_before))
    kv, chain = world.kv, world.chain(ids(known))
    match = kv.match(chain, known)
    needed, before = kv.blocks_needed(match.num_tokens, known), kv.pool.num_available
    with world.step(retires=False):  # while it runs, what a window drops does not come back
        pass
    lease = kv.acquire(match)
    assert lease is not None
    start = match.num_tokens
    for end in [*sorted(cut for cut in cuts if start < cut < known), known]:
        assert kv.extend(lease, start, end) is not None
        start = end
    assert before - kv.pool.num_available == needed + match.num_idle


@every_group
def test_the_longest_sequence_fills_the_pool_and_no_longer_one_fits(
    groups: tuple[CacheGroupSpec, ...],
) -> None:
    world = cache(groups, num_blocks=20)
    most = world.kv.max_tokens_in_pool()
    lease = world.kv.acquire(world.kv.no_match())
    assert lease is not None
    assert world.kv.extend(lease, 0, most) is not None
    assert world.kv.extend(lease, 0, most + 1) is None


def test_blocks_released_while_a_step_runs_serve_nobody_before_it_is_over() -> None:
    world = cache(num_blocks=5)
    with world.step(retires=False) as step:
        lease, _, _ = world.admit(ids(20))
        world.kv.extend(lease, 0, 20)
    world.kv.release(lease)
    other = world.kv.acquire(world.kv.no_match())
    assert other is not None
    assert world.kv.extend(other, 0, 4) is None
    world.kv.retire(step)
    assert world.kv.extend(other, 0, 4) is not None
