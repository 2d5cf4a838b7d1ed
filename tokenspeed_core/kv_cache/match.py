"""The data of prefix hits: the tokens and block table entries that a sequence can reuse."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TableEntries:
    """Consecutive entries of one group's block table: `table[start + i] = blocks[i]`."""

    start: int
    blocks: tuple[int, ...]


NO_ENTRIES = TableEntries(0, ())


@dataclass(frozen=True, slots=True)
class Match:
    """A prefix hit.

    `num_tokens` is the length at which every group can resume, `entries` are the blocks per group that hold it, and
    `num_idle` is how many of their pages are available now.
    """

    num_tokens: int
    entries: tuple[TableEntries, ...]
    num_idle: int
