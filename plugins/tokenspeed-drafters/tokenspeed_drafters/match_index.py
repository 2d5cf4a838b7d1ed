"""Finds earlier occurrences of the last tokens of a text, in constant time per token and bounded memory.

The text is a ring of the newest tokens. For each order m, tokens whose last m tokens have the same hash form a chain
from the newest to the oldest, as in the match finders of LZ77 compressors. A search walks the chain of the highest
order that has a match, and compares tokens, so that hash collisions do no harm. Positions are absolute: the token at
position p was the p-th that was added.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tokenspeed_drafters.arrays import I32

ORDERS = (8, 4, 2, 1)  # lengths of the hashed contexts, in tokens
MAX_CONTEXT = 32  # longer matches count as this long
MAX_OCCURRENCES = 8  # that a search returns
MAX_VISITED = 24  # entries of a chain that a search looks at
SEPARATOR = -1  # between texts; matches no token
BYTES_PER_TOKEN = 4 * (1 + 2 * len(ORDERS))

_MIN_CAPACITY = 256
_MAX_BUCKETS = 65536  # NumPy sorts 16-bit keys in linear time
_MAX_POSITION = 2**31 - 1
_FACTOR = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


class Occurrence(NamedTuple):
    """An earlier occurrence of a context: `length` tokens of it precede `position`, where its continuation starts."""

    position: int
    length: int


Hashes = tuple[int, int, int, int]
"""64-bit hashes of the last 8, 4, 2 and 1 tokens of a text. Tokens before its first count as missing."""


class MatchIndex:
    """The newest tokens of a text, at most `max_tokens`, a power of two, and the chains of their contexts."""

    def __init__(self, max_tokens: int) -> None:
        """Start without tokens. Memory grows with them."""
        if max_tokens < _MIN_CAPACITY or max_tokens & (max_tokens - 1):
            raise ValueError(f"max_tokens is {max_tokens}; it must be a power of two, at least 256")
        self._max_tokens = max_tokens
        self.hashes: Hashes = (0, 0, 0, 0)  # of the newest tokens
        # Of the last token; of the last two pairs; of the last four runs of four tokens, the newest first.
        self._recent: tuple[int, int, int, int, int, int, int]
        self.clear()

    def clear(self) -> None:
        """Drop all tokens."""
        self.num_tokens = 0  # ever added
        self._allocate(_MIN_CAPACITY)
        self._set_recent(np.zeros(0, np.int32))

    @property
    def capacity(self) -> int:
        """Number of tokens for which memory is allocated."""
        return self._capacity

    @property
    def oldest(self) -> int:
        """Position of the oldest token that is kept."""
        return max(0, self.num_tokens - self._capacity)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add tokens that continue the last text."""
        if self.num_tokens + len(token_ids) > self._capacity < self._max_tokens:
            self._grow(self.num_tokens + len(token_ids))
        mask, last_bucket = self._capacity - 1, self._num_buckets - 1
        tokens, position = self._tokens, self.num_tokens
        eights, fours, twos, singles = self._chains
        (eight_heads, eight_previous), (four_heads, four_previous) = eights, fours
        (two_heads, two_previous), (single_heads, single_previous) = twos, singles
        one, pair, pair_1, quad, quad_1, quad_2, quad_3 = self._recent
        eight = self.hashes[0]
        for token in token_ids:
            previous_one, pair_2, quad_4 = one, pair_1, quad_3
            pair_1, quad_3, quad_2, quad_1 = pair, quad_2, quad_1, quad
            one = (token + 1) * _FACTOR & _MASK
            pair = (one * _FACTOR + previous_one) & _MASK
            quad = (pair * _FACTOR + pair_2) & _MASK
            eight = (quad * _FACTOR + quad_4) & _MASK
            at = position & mask
            tokens[at] = token
            bucket = eight >> 48 & last_bucket
            eight_previous[at], eight_heads[bucket] = eight_heads[bucket], position
            bucket = quad >> 48 & last_bucket
            four_previous[at], four_heads[bucket] = four_heads[bucket], position
            bucket = pair >> 48 & last_bucket
            two_previous[at], two_heads[bucket] = two_heads[bucket], position
            bucket = one >> 48 & last_bucket
            single_previous[at], single_heads[bucket] = single_heads[bucket], position
            position += 1
        self.num_tokens = position
        self._recent = (one, pair, pair_1, quad, quad_1, quad_2, quad_3)
        self.hashes = (eight, quad, pair, one)

    def append_all(self, token_ids: I32) -> None:
        """Add a text. Its contexts do not reach back to earlier texts."""
        token_ids = token_ids[-self._max_tokens :]
        num_new = len(token_ids)
        if self.num_tokens + num_new > _MAX_POSITION:
            self.clear()
        if self.num_tokens + num_new > self._capacity < self._max_tokens:
            self._grow(self.num_tokens + num_new)
        # Chunks of the capacity: a chunk must not overwrite itself.
        for start in range(0, num_new, self._capacity):
            self._append_chunk(token_ids, start, min(num_new, start + self._capacity))
        self._set_recent(token_ids)

    def find(self, hashes: Hashes, context: Sequence[int]) -> list[Occurrence]:
        """Return occurrences of the longest suffix of `context` that a chain has, the newest first.

        `context` are the last tokens before the wanted continuation, at most MAX_CONTEXT; `hashes` are theirs. An
        occurrence at the end of the text, which has no continuation, does not count.
        """
        mask, oldest, end = self._capacity - 1, self.oldest, self.num_tokens
        tokens, last_bucket = self._tokens, self._num_buckets - 1
        found: list[Occurrence] = []
        for order, (head, previous), value in zip(ORDERS, self._chains, hashes, strict=True):
            if len(context) < order:
                continue
            position = head[(value >> 48) & last_bucket]
            for _ in range(MAX_VISITED):
                if position < oldest:
                    break
                if position + 1 < end and tokens[position & mask] == context[-1]:
                    length = self._match_length(position, context)
                    if length >= order:
                        found.append(Occurrence(position + 1, length))
                        if len(found) == MAX_OCCURRENCES:
                            break
                position = previous[position & mask]
            if found:
                return found
        return found

    def continuation(self, position: int, num_tokens: int) -> list[int]:
        """Return up to `num_tokens` tokens from a position on. At the end of the text they repeat from the position."""
        num_left, capacity = self.num_tokens - position, self._capacity
        if num_left <= 0 or num_left > capacity or position < 0:
            return []
        at = position & (capacity - 1)
        if num_tokens <= num_left and at + num_tokens <= capacity:
            direct: list[int] = self._tokens[at : at + num_tokens].tolist()
            return direct
        found = self._slice(position, min(num_tokens, num_left))
        while len(found) < num_tokens:
            found += found[: num_tokens - len(found)] if len(found) >= num_left else []
        return found

    def last(self, num_tokens: int) -> list[int]:
        """Return the last tokens of the text, at most `num_tokens`."""
        num_tokens = min(num_tokens, self.num_tokens - self.oldest)
        return self._slice(self.num_tokens - num_tokens, num_tokens)

    def _slice(self, start: int, num_tokens: int) -> list[int]:
        at = start & (self._capacity - 1)
        end = at + num_tokens
        found: list[int] = self._tokens[at:end].tolist()
        if end > self._capacity:
            found += self._tokens[: end - self._capacity].tolist()
        return found

    def _match_length(self, position: int, context: Sequence[int]) -> int:
        """Return how many tokens up to and with a position equal the end of the context."""
        mask, tokens = self._capacity - 1, self._tokens
        limit = min(len(context), MAX_CONTEXT, position - self.oldest + 1)
        start = (position & mask) + 1 - limit
        if start >= 0 and tokens[start : start + limit].tolist() == context[-limit:]:
            return limit
        length = 1  # the caller compared the last token
        while length < limit and tokens[(position - length) & mask] == context[-1 - length]:
            length += 1
        return length

    def _allocate(self, capacity: int) -> None:
        self._capacity = capacity
        self._num_buckets = min(capacity, _MAX_BUCKETS)
        self._token_array = np.empty(capacity, np.int32)
        self._head_array = np.full((len(ORDERS), self._num_buckets), -1, np.int32)
        self._previous_array = np.empty((len(ORDERS), capacity), np.int32)
        # Views: reading one number from them takes a third of the time.
        self._tokens = self._token_array.data
        self._chains = [
            (head.data, previous.data)
            for head, previous in zip(self._head_array, self._previous_array, strict=True)
        ]

    def _grow(self, num_tokens: int) -> None:
        """Double the capacity until it suffices, at most to `max_tokens`. Nothing was overwritten before."""
        capacity = self._capacity
        while capacity < min(num_tokens, self._max_tokens):
            capacity *= 2
        kept = self._token_array[: self.num_tokens]
        self.num_tokens = 0
        self._allocate(capacity)
        if len(kept):
            self._append_chunk(kept, 0, len(kept))

    def _append_chunk(self, token_ids: I32, start: int, end: int) -> None:
        """Add `token_ids[start:end]`. Their contexts begin at `token_ids[0]` at the earliest."""
        first = self.num_tokens
        at = np.arange(first, first + end - start) & (self._capacity - 1)
        self._token_array[at] = token_ids[start:end]
        reach = max(0, start - ORDERS[0] + 1)
        hashes = _all_hashes(token_ids[reach:end])[:, start - reach :]
        buckets = (hashes >> np.uint64(48)).astype(np.uint16) & np.uint16(self._num_buckets - 1)
        # Tokens of a bucket become neighbors, the oldest first; each is chained to the one before.
        order = np.argsort(buckets, axis=1, kind="stable")
        rows = np.arange(len(ORDERS))[:, np.newaxis]
        buckets = buckets[rows, order]
        positions = (order + first).astype(np.int32)
        is_first = np.ones(buckets.shape, np.bool_)
        np.not_equal(buckets[:, 1:], buckets[:, :-1], out=is_first[:, 1:])
        chain = np.empty(buckets.shape, np.int32)
        chain[:, 1:] = positions[:, :-1]
        chain[is_first] = self._head_array[rows, buckets][is_first]
        self._previous_array[rows, at[order]] = chain
        is_last = np.ones(buckets.shape, np.bool_)
        is_last[:, :-1] = is_first[:, 1:]
        row, column = is_last.nonzero()
        self._head_array[row, buckets[row, column]] = positions[row, column]
        self.num_tokens = first + end - start

    def _set_recent(self, token_ids: I32) -> None:
        """Keep the hashes of a text's last tokens, because the hashes of the next tokens depend on them."""
        eight, quad, pair, one = (
            [0] * 4 + row for row in _all_hashes(token_ids[-ORDERS[0] :]).tolist()
        )
        self.hashes = (eight[-1], quad[-1], pair[-1], one[-1])
        self._recent = (one[-1], pair[-1], pair[-2], quad[-1], quad[-2], quad[-3], quad[-4])


def _all_hashes(token_ids: I32) -> np.ndarray[tuple[int, int], np.dtype[np.uint64]]:
    """Return the hashes after each token: one row for each order."""
    hashes = np.empty((len(ORDERS), len(token_ids)), np.uint64)
    shorter = hashes[-1]
    np.multiply((token_ids + np.int32(1)).astype(np.uint64), np.uint64(_FACTOR), out=shorter)
    for row, distance in ((2, 1), (1, 2), (0, 4)):
        np.multiply(shorter, np.uint64(_FACTOR), out=hashes[row])
        hashes[row, distance:] += shorter[:-distance]
        shorter = hashes[row]
    return hashes
