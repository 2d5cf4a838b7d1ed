"""How the blocks of cache groups with unequal sizes share the pages of one arena.

A page holds blocks of one group at a time, and each group has its own number of blocks per page. All pages have the
same size, so any free page serves any group.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import lcm

from tokenspeed_core.api.cache_groups import CacheGroupSpec, values_per_token

_ALIGNMENT = 256  # bytes; blocks start at multiples of it
MAX_WASTE = 1 / 16
"""A page is enlarged until no group leaves more than this share of it unused. With three or more groups, there may be no
such page; then the one that wastes least is chosen."""
_MAX_BLOCKS = 16  # of the group with the largest blocks, in one page
_MAX_IN_FLIGHT = 16  # tokens of a sequence's decodes in flight; without pages for more, draft tokens are left out
UNLIMITED = 2**31 - 1


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """The blocks of one group. Block `i` of its numbering begins at byte `i * stride` of the arena."""

    name: str
    bytes_per_token: int
    block_bytes: int
    blocks_per_page: int
    stride: int  # bytes
    max_pages: int  # that one sequence holds at once


@dataclass(frozen=True, slots=True)
class PageLayout:
    """The pages of an arena. `block_size` is in tokens and the same for all groups."""

    block_size: int
    page_bytes: int
    groups: tuple[GroupLayout, ...]

    @classmethod
    def of(
        cls,
        groups: Sequence[CacheGroupSpec],
        block_size: int,
        dtype_bytes: int,
        max_chunk: int | None = None,
    ) -> PageLayout:
        """Return the smallest page at which no group wastes more than `MAX_WASTE`, or the page that wastes least.

        A step computes at most `max_chunk` tokens of a sequence (None: any number).
        """
        token_bytes = [values_per_token(group) * dtype_bytes for group in groups]
        units = [-(-block_size * each // _ALIGNMENT) for each in token_bytes]
        best = _best_page(units)
        page_bytes = best.units * _ALIGNMENT
        return cls(
            block_size,
            page_bytes,
            tuple(
                GroupLayout(
                    group.name,
                    each,
                    block_size * each,
                    number,
                    page_bytes // number,
                    max_pages_held(group, block_size, number, max_chunk),
                )
                for group, each, number in zip(groups, token_bytes, best.numbers, strict=True)
            ),
        )

    @property
    def blocks_per_page(self) -> tuple[int, ...]:
        """Blocks of each group in one page."""
        return tuple(group.blocks_per_page for group in self.groups)

    @property
    def max_pages(self) -> tuple[int, ...]:
        """Maximum number of pages of each group that one sequence uses at any time."""
        return tuple(group.max_pages for group in self.groups)

    def num_pages(self, num_tokens: int) -> int:
        """Return the pages for `num_tokens` tokens in every group."""
        num_blocks = -(-num_tokens // self.block_size)
        return sum(-(-num_blocks // each) for each in self.blocks_per_page)

    def num_pages_of_sequence(self, num_tokens: int) -> int:
        """Return the maximum number of pages that a sequence of `num_tokens` tokens uses at any time."""
        num_blocks = -(-num_tokens // self.block_size)
        return pages_of_blocks(num_blocks, self.blocks_per_page, self.max_pages)

    def max_sequence_len(self, num_pages: int) -> int:
        """Return the tokens of the longest sequence that fits into `num_pages`."""
        return blocks_of_pages(num_pages, self.blocks_per_page, self.max_pages) * self.block_size

    def waste(self, group: GroupLayout) -> float:
        """Return the share of a page that its blocks leave unused when a group fills it."""
        return 1 - group.blocks_per_page * group.block_bytes / self.page_bytes


def max_pages_held(
    group: CacheGroupSpec, block_size: int, blocks_per_page: int, max_chunk: int | None
) -> int:
    """Return the maximum number of pages of a group that one sequence holds at once.

    They contain the window of the first query in flight, the chunk that is computed, and the block that comes next;
    the first and the last page may be used partly.
    """
    if group.window is None or max_chunk is None:
        return UNLIMITED
    num_tokens = group.window - 1 + max_chunk + _MAX_IN_FLIGHT
    num_blocks = (num_tokens + 2 * (block_size - 1)) // block_size + 1
    return (num_blocks + 2 * blocks_per_page - 2) // blocks_per_page


def pages_of_blocks(
    num_blocks: int, blocks_per_page: Sequence[int], max_pages: Sequence[int]
) -> int:
    """Return the maximum number of pages that a sequence of `num_blocks` blocks uses at any time."""
    return sum(
        min(-(-num_blocks // per_page), most)
        for per_page, most in zip(blocks_per_page, max_pages, strict=True)
    )


def blocks_of_pages(
    num_pages: int, blocks_per_page: Sequence[int], max_pages: Sequence[int]
) -> int:
    """Return the blocks of the longest sequence that fits into `num_pages`.

    It is at most the capacity for the group with the smallest blocks, even if every group has a window.
    """

    def needed(num_blocks: int) -> int:
        return pages_of_blocks(num_blocks, blocks_per_page, max_pages)

    numbers = range(num_pages * max(blocks_per_page) + 1)
    return bisect_right(numbers, num_pages, key=needed) - 1


@dataclass(frozen=True, order=True, slots=True)
class _Page:
    """The size of a page in units of `_ALIGNMENT`, a multiple of each group's number of blocks in it."""

    units: int
    numbers: tuple[int, ...]

    def waste(self, units: Sequence[int]) -> float:
        """Return the largest share that a group leaves unused, given the size of its blocks."""
        least = min(number * unit for number, unit in zip(self.numbers, units, strict=True))
        return 1 - least / self.units


def _best_page(units: Sequence[int]) -> _Page:
    """Return the smallest page with a waste of at most `MAX_WASTE`, or the page that wastes least."""
    exact = _candidates(units, lambda number: number)
    best = min(sorted(exact), key=lambda page: max(MAX_WASTE, page.waste(units)))
    if best.waste(units) <= MAX_WASTE:
        return best
    pages = exact | _candidates(units, _round_down)
    return min(sorted(pages), key=lambda page: max(MAX_WASTE, page.waste(units)))


def _candidates(units: Sequence[int], change: Callable[[int], int]) -> set[_Page]:
    """Return pages that some group fills almost exactly, with changed numbers of blocks.

    The size of a page is a multiple of these numbers.
    """
    largest = max(units)
    pages = set()
    for unit in set(units):
        for number in range(-(-largest // unit), _MAX_BLOCKS * largest // unit + 1):
            numbers = tuple(change(number * unit // each) for each in units)
            multiple = lcm(*numbers)
            pages.add(_Page(-(-number * unit // multiple) * multiple, numbers))
    return pages


@cache
def _round_down(number: int) -> int:
    """Return the largest number up to `number` > 0 with the prime factors 2, 3 and 5 only.

    The least common multiples of such numbers are smaller than those of arbitrary ones.
    """
    rest = number
    for factor in (2, 3, 5):
        while rest % factor == 0:
            rest //= factor
    return number if rest == 1 else _round_down(number - 1)
