"""Cache groups of unequal size share one arena. These tests count bytes."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tokenspeed_core.api.cache_groups import (
    CacheGroupSpec,
    CachePart,
    FullAttention,
    LatentAttention,
    SlidingWindow,
    values_per_token,
)
from tokenspeed_core.kv_cache.hashing import HashChain
from tokenspeed_core.kv_cache.lease import ABSENT, BlockLease
from tokenspeed_core.kv_cache.manager import KVManager
from tokenspeed_core.kv_cache.page_layout import MAX_WASTE, UNLIMITED, PageLayout

BLOCK = 4


@dataclass(frozen=True, slots=True)
class Large:
    """A group with much larger blocks than those of attention, as large as a recurrent state."""

    name: str
    num_layers: int
    size: int
    window: int

    @property
    def parts(self) -> tuple[CachePart, ...]:
        return (CachePart("state", (self.size,)),)

    def first_needed(self, length: int) -> int:
        return max(0, length - self.window + 1)


GEMMA_3_4B = (
    FullAttention("full", 5, 4, 256),
    SlidingWindow("window", 29, 4, 256, 1024),
)
GEMMA = (FullAttention("full", 1, 4, 256), SlidingWindow("window", 5, 4, 256, 10))
HYBRID = (FullAttention("full", 12, 2, 256), Large("state", 36, 35_000, 4))
LATENT = (
    LatentAttention("latent", 27, 512, 64),
    SlidingWindow("window", 3, 8, 128, 7),
    FullAttention("draft", 1, 8, 128),
)
SETS: dict[str, tuple[CacheGroupSpec, ...]] = {
    "gemma": GEMMA,
    "hybrid": HYBRID,
    "latent": LATENT,
    "equal": (FullAttention("full", 2, 1, 64), SlidingWindow("window", 2, 1, 64, 9)),
    "one": (FullAttention("full", 2, 1, 64),),
}


# -- the layout -----------------------------------------------------------------------------------


def waste_of_one_block_per_page(groups: tuple[CacheGroupSpec, ...]) -> float:
    """Return the largest unused share of a page that holds one block of any group."""
    sizes = [values_per_token(group) for group in groups]
    return 1 - min(sizes) / max(sizes)


@pytest.mark.parametrize(
    ("groups", "before", "after"),
    [(GEMMA_3_4B, 0.828, 0.033), (HYBRID, 0.990, 0.005), (LATENT, 0.868, 0.015)],
)
def test_waste_of_known_models(
    groups: tuple[CacheGroupSpec, ...], before: float, after: float
) -> None:
    layout = PageLayout.of(groups, 16, 2)
    assert waste_of_one_block_per_page(groups) == pytest.approx(before, abs=0.001)
    assert max(map(layout.waste, layout.groups)) == pytest.approx(after, abs=0.001)


def test_one_group_fills_its_pages() -> None:
    layout = PageLayout.of((FullAttention("full", 36, 8, 128),), 16, 2)
    (group,) = layout.groups
    assert layout.blocks_per_page == (1,)
    assert layout.page_bytes == group.stride == group.block_bytes == 36 * 2 * 16 * 8 * 128 * 2
    assert group.bytes_per_token == 36 * 2 * 8 * 128 * 2


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(2**9, 2**16), min_size=1, max_size=4))
@example([753, 793, 1041, 48201])
def test_blocks_lie_in_pages_without_overlap(sizes: list[int]) -> None:
    groups = [LatentAttention(str(i), 1, size, 0) for i, size in enumerate(sizes)]
    layout = PageLayout.of(groups, 16, 2)
    for group, size in zip(layout.groups, sizes, strict=True):
        assert group.block_bytes == 16 * 2 * size
        assert group.block_bytes <= group.stride
        assert group.stride * group.blocks_per_page == layout.page_bytes
        assert group.stride % 256 == 0
        # Of three and more groups of small blocks, no page of limited size may suit all.
        most = MAX_WASTE if len(sizes) <= 2 else 0.25
        assert layout.waste(group) <= most + 256 / group.block_bytes
    assert layout.page_bytes < 18 * 16 * 2 * max(sizes)


@given(st.integers(1, 200), st.lists(st.integers(1, 7), min_size=1, max_size=3))
def test_longest_sequence_fits(num_pages: int, blocks_per_page: list[int]) -> None:
    groups = [LatentAttention(str(i), 1, 8, 0) for i in range(len(blocks_per_page))]
    kv = KVManager(groups, BLOCK, num_pages, blocks_per_page=blocks_per_page)
    most = kv.max_sequence_len
    assert kv.num_pages_needed(0, most) <= num_pages < kv.num_pages_needed(0, most + 1)


def test_window_takes_pages_for_a_window_and_a_chunk() -> None:
    layout = PageLayout.of(GEMMA_3_4B, 16, 2, max_chunk=8192)
    full, window = layout.groups
    assert full.max_pages == UNLIMITED
    assert (1023 + 8192) // 16 < window.max_pages < (1023 + 8192) // 16 + 6
    whole = PageLayout.of(GEMMA_3_4B, 16, 2)
    assert whole.num_pages_of_sequence(131072) == 131072 // 16 + -(-131072 // 96)
    assert layout.num_pages_of_sequence(131072) == window.max_pages + -(-131072 // 96)
    assert layout.num_pages_of_sequence(512) == whole.num_pages_of_sequence(512)
    pages = layout.num_pages_of_sequence(131072)
    assert 131072 <= layout.max_sequence_len(pages) < 131072 + 96


def test_groups_are_evicted_evenly() -> None:
    groups = (FullAttention("full", 1, 1, 1), LatentAttention("latent", 1, 1, 0))
    kv = KVManager(groups, BLOCK, 16, blocks_per_page=(3, 1))
    tokens = np.arange(12 * BLOCK, dtype=np.int32)
    chain = kv.chain("", 0)
    chain.extend(tokens)
    kv.begin(1)
    lease = kv.acquire(kv.no_match())
    assert kv.extend(lease, 0, len(tokens)) is not None
    kv.cache_full_blocks(lease, chain, len(tokens), tokens)
    kv.release(lease)
    assert kv.counts().cached == 12 // 3 + 12
    for num_pages, left in ((4, 9), (4, 6), (4, 3)):  # a page of `full` and three of `latent`
        assert kv.pool.take(num_pages) is not None
        assert kv.match(chain, len(tokens) + 1).num_tokens == left * BLOCK


# -- the manager ----------------------------------------------------------------------------------


@dataclass
class Holder:
    """A sequence: its tokens, its lease, and how many of its tokens are computed."""

    tokens: np.ndarray
    chain: HashChain
    lease: BlockLease
    resumed: int
    computed: int


@dataclass
class Arena:
    """A manager over an arena of bytes, and the sequences that use it."""

    groups: tuple[CacheGroupSpec, ...]
    num_pages: int
    layout: PageLayout = field(init=False)
    kv: KVManager = field(init=False)
    holders: list[Holder] = field(default_factory=list)
    launched: int = 0
    retired: int = 0

    def __post_init__(self) -> None:
        self.layout = PageLayout.of(self.groups, BLOCK, 2)
        per_page = self.layout.blocks_per_page
        self.kv = KVManager(self.groups, BLOCK, self.num_pages, blocks_per_page=per_page)

    def admit(self, tokens: np.ndarray) -> None:
        chain = self.kv.chain("", 0)
        chain.extend(tokens)
        match = self.kv.match(chain, len(tokens))
        counts = self.kv.counts()
        lease = self.kv.acquire(match)
        assert counts.free + counts.cached - match.num_idle == self.kv.pool.num_available
        self.holders.append(Holder(tokens, chain, lease, match.num_tokens, match.num_tokens))

    def grow(self, holder: Holder, num_tokens: int) -> None:
        """Compute tokens of a sequence, and check the prediction of the pages that they need."""
        kv, lease = self.kv, holder.lease
        start, end = holder.computed, min(holder.computed + num_tokens, len(holder.tokens))
        columns = (np.asarray([n], np.int32) for n in (holder.resumed, lease.capacity, end))
        predicted = int(kv.num_new_pages(*columns)[0])
        limit = kv.max_capacity(lease)
        for group, spec in enumerate(self.groups):
            kv._drop_before(group, lease, spec.first_needed(start) // BLOCK)
        available = kv.pool.num_available
        entries = kv.extend(lease, start, end)
        if entries is None:
            assert predicted > available
            assert kv.pool.num_available == available
            return
        assert available - kv.pool.num_available == predicted
        # Dropping blocks may have made more pages available than there were before.
        assert end <= limit or lease.capacity > limit
        for table, new in zip(lease.tables, entries, strict=True):
            assert table[new.start : new.start + len(new.blocks)] == list(new.blocks)
        kv.cache_full_blocks(lease, holder.chain, end, holder.tokens)
        holder.computed = end

    def launch(self) -> None:
        self.launched += 1
        self.kv.launch(self.launched)
        self.kv.begin(self.launched + 1)

    def retire(self) -> None:
        if self.retired < self.launched:
            self.retired += 1
            self.kv.retire(self.retired)

    def check(self) -> None:
        """Compare the bytes of all live blocks with each other and with the pool's counts."""
        owners: dict[tuple[int, int], bytes] = {}  # content by (group, block)
        refs = [0] * self.num_pages
        for holder in self.holders:
            lengths = {len(table) for table in holder.lease.tables}
            assert lengths == {holder.lease.capacity // BLOCK}
            for group, spec in enumerate(self.groups):
                per_page = self.layout.blocks_per_page[group]
                table, spare = holder.lease.tables[group], holder.lease.spare[group]
                for block in (*table, *spare):
                    if block != ABSENT:
                        refs[block // per_page] += 1
                first = spec.first_needed(holder.computed) // BLOCK
                for index, block in enumerate(table):
                    assert block != ABSENT or index < first, "a needed block is absent"
                    if block != ABSENT:
                        content = holder.tokens[: (index + 1) * BLOCK].tobytes()
                        assert owners.setdefault((group, block), content) == content
                self.check_waste(group, holder)
        assert refs == self.kv.pool._refs
        live = sorted(
            (block * self.layout.groups[group].stride, self.layout.groups[group].block_bytes)
            for group, block in owners
        )
        assert all(start + size <= following for (start, size), (following, _) in pairwise(live))
        assert not live or sum(live[-1]) <= self.num_pages * self.layout.page_bytes
        counts = self.kv.counts()
        assert counts.held == sum(each > 0 for each in refs)
        assert sum((counts.free, counts.cached, counts.held, counts.pending)) == self.num_pages

    def check_waste(self, group: int, holder: Holder) -> None:
        """Check the bound of the bytes that a sequence holds for blocks that it does not use."""
        per_page, size = self.layout.blocks_per_page[group], self.layout.groups[group].block_bytes
        own = holder.lease.tables[group][holder.resumed // BLOCK :]
        own = [block for block in own if block != ABSENT]
        held = {block // per_page for block in (*own, *holder.lease.spare[group])}
        used = len(own) * size
        unused = len(held) * self.layout.page_bytes - used
        share = len(held) * self.layout.waste(self.layout.groups[group]) * self.layout.page_bytes
        assert unused <= share + 2 * (per_page - 1) * size + 1e-6 * self.layout.page_bytes


@pytest.mark.parametrize("name", SETS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_no_byte_belongs_to_two_blocks(name: str, data: st.DataObject) -> None:
    arena = Arena(SETS[name], data.draw(st.integers(4, 24)))
    for _ in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["admit", "grow", "grow", "end", "launch", "retire"]))
        which = data.draw(st.integers(0, 99))
        if action == "admit":
            base, length = which % 3, data.draw(st.integers(1, 80))
            shared = np.arange(length // 2, dtype=np.int32) + 100 * base
            own = np.full(length - length // 2, which, np.int32)
            arena.admit(np.concatenate((shared, own)))
        elif action == "launch":
            arena.launch()
        elif action == "retire":
            arena.retire()
        elif arena.holders and action == "grow":
            holder = arena.holders[which % len(arena.holders)]
            arena.grow(holder, data.draw(st.integers(1, 40)))
        elif arena.holders:
            arena.kv.release(arena.holders.pop(which % len(arena.holders)).lease)
        arena.check()
    for holder in arena.holders:
        arena.kv.release(holder.lease)
    while arena.retired < arena.launched:
        arena.retire()
    counts = arena.kv.counts()
    assert (counts.held, counts.pending) == (0, 0)
    arena.kv.reset_prefix_cache()
    assert arena.kv.counts().free == arena.num_pages
