"""Finds earlier occurrences of the last tokens of a text, in constant time per token and bounded memory.

The text is a ring of the newest tokens. For each order m, tokens whose last m tokens have the same hash form a chain
from the newest to the oldest, as in the match finders of LZ77 compressors. A search walks the chain of the highest
order that has a match, and compares tokens, so that hash collisions do no harm. New tokens are chained many at a time,
and a search scans those that are not chained yet. Positions are absolute: the token at position p was the p-th that was
added.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import NamedTuple

import numpy as np

from tokenspeed_drafters.arrays import I32

ORDERS = (8, 4, 2, 1)  # lengths of the hashed contexts, in tokens
MAX_CONTEXT = 32  # longer matches count as this long
MAX_OCCURRENCES = 4  # that a search returns
MAX_VISITED = 24  # entries of a chain that a search looks at
SEPARATOR = -1  # between texts; matches no token
BYTES_PER_TOKEN = 4 * (1 + 2 * len(ORDERS))

_MIN_CAPACITY = 256
_MAX_UNCHAINED = 128  # NumPy chains many tokens at a time faster than Python chains each
_MAX_BUCKETS = 65536  # NumPy sorts 16-bit keys in linear time
_MAX_POSITION = 2**31 - 1
_FACTORS = [pow(0x9E3779B97F4A7C15, i, 2**64) for i in range(1, ORDERS[0] + 1)]


class Matches(NamedTuple):
    """Earlier occurrences of a context: the positions of their continuations, the newest first.

    `length` is how many of the context's last tokens precede the newest one.
    """

    positions: list[int]
    length: int


NO_MATCHES = Matches([], 0)


class Context:
    """The last tokens before a wanted continuation, at most MAX_CONTEXT."""

    __slots__ = ("data", "hashes", "token_ids")

    def __init__(self, token_ids: list[int], data: bytes) -> None:
        """`data` is the tokens as bytes."""
        self.token_ids = token_ids
        self.data = data
        sums = [*accumulate(map(mul, reversed(token_ids), _FACTORS), initial=0)]
        self.hashes = [sums[order] if order < len(sums) else 0 for order in ORDERS]


class MatchIndex:
    """The newest tokens of a text, at most `max_tokens`, a power of two, and the chains of their contexts."""

    def __init__(self, max_tokens: int) -> None:
        """Start without tokens. Memory grows with them."""
        if max_tokens < _MIN_CAPACITY or max_tokens & (max_tokens - 1):
            raise ValueError(f"max_tokens is {max_tokens}, expected a power of two of at least 256")
        self._max_tokens = max_tokens
        self.clear()

    def clear(self) -> None:
        """Drop all tokens."""
        self.num_tokens = 0  # ever added
        self._num_chained = 0  # of them
        self._text_start = 0  # of the last text: contexts do not reach back further
        self._allocate(_MIN_CAPACITY)

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
        start, end = self.num_tokens, self.num_tokens + len(token_ids)
        self._reserve(end)
        tokens, mask = self._tokens, self._capacity - 1
        for position, token in enumerate(token_ids, start):
            tokens[position & mask] = token
        self.num_tokens = end
        if end - self._num_chained > _MAX_UNCHAINED:
            self._chain()

    def append_all(self, token_ids: I32) -> None:
        """Add a text. Its contexts do not reach back to earlier texts."""
        token_ids = token_ids[-self._max_tokens :]
        if self.num_tokens + len(token_ids) > _MAX_POSITION:
            self.clear()
        start, end = self.num_tokens, self.num_tokens + len(token_ids)
        self._reserve(end)
        is_short = end - self._num_chained <= _MAX_UNCHAINED
        if not is_short:
            self._chain()
        self._token_array[np.arange(start, end) & (self._capacity - 1)] = token_ids
        self._text_start, self.num_tokens = start, end
        if not is_short:
            self._chain()

    def context(self) -> Context:
        """Return the end of the text."""
        start = max(self.num_tokens - MAX_CONTEXT, self.oldest)
        num_tokens = self.num_tokens - start
        return Context(self._slice(start, num_tokens), self._data(start, num_tokens))

    def find(self, context: Context) -> Matches:
        """Return occurrences of the longest suffix of `context` that has one of ORDERS.

        An occurrence at the end of the text, which has no continuation, does not count.
        """
        mask, oldest, end = self._capacity - 1, self.oldest, self.num_tokens
        tokens, last_bucket, last = self._tokens, self._num_buckets - 1, context.token_ids[-1]
        # The tokens that are not chained yet, and earlier ones of their contexts.
        first = max(self._num_chained - ORDERS[0] + 1, oldest)
        recent = self._data(first, end - 1 - first) if self._num_chained < end else b""
        if context.data[-4:] not in recent:
            recent = b""
        for order, (head, previous), value in zip(
            ORDERS, self._chains, context.hashes, strict=True
        ):
            suffix = context.token_ids[-order:]
            if len(suffix) < order:
                continue
            found: list[int] = []
            if recent:
                self._find_recent(recent, first, context.data[-4 * order :], found)
            position = head[value >> 48 & last_bucket]
            for _ in range(MAX_VISITED):
                start = position - order + 1
                if start < oldest or len(found) >= MAX_OCCURRENCES:
                    break
                if (
                    tokens[position & mask] == last
                    and position + 1 < end
                    and (order == 1 or self._slice(start, order) == suffix)
                ):
                    found.append(position + 1)
                position = previous[position & mask]
            if found:
                return Matches(found, self._match_length(found[0] - 1, order, context.token_ids))
        return NO_MATCHES

    def _find_recent(self, recent: bytes, first: int, suffix: bytes, found: list[int]) -> None:
        """Append the positions after occurrences of a suffix whose last token is not chained yet, the newest first.

        `recent` has the tokens from the position `first` on, as bytes.
        """
        size = len(suffix)
        start, end = max(0, 4 * (self._num_chained + 1 - first) - size), len(recent)
        while len(found) < MAX_OCCURRENCES and (at := recent.rfind(suffix, start, end)) >= 0:
            if at % 4 == 0:
                found.append(first + (at + size) // 4)
            end = at + size - 1

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

    def _data(self, start: int, num_tokens: int) -> bytes:
        at = start & (self._capacity - 1)
        end = at + num_tokens
        found = bytes(self._bytes[4 * at : 4 * end])
        if end > self._capacity:
            found += bytes(self._bytes[: 4 * (end - self._capacity)])
        return found

    def _match_length(self, position: int, length: int, token_ids: list[int]) -> int:
        """Return how many tokens up to a position equal the last of `token_ids`. At least `length` of them do."""
        tokens, mask = self._tokens, self._capacity - 1
        longest = min(len(token_ids), position + 1 - self.oldest)
        while length < longest and tokens[position - length & mask] == token_ids[-1 - length]:
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
        self._bytes = self._tokens.cast("B")
        self._chains = [
            (head.data, previous.data)
            for head, previous in zip(self._head_array, self._previous_array, strict=True)
        ]

    def _reserve(self, num_tokens: int) -> None:
        """Double the capacity until it suffices, at most to `max_tokens`."""
        capacity = self._capacity
        if num_tokens <= capacity or capacity == self._max_tokens:
            return
        while capacity < min(num_tokens, self._max_tokens):
            capacity *= 2
        tokens, heads, previous = self._token_array, self._head_array, self._previous_array
        kept, chained = self.num_tokens, self._num_chained  # nothing was overwritten before
        self._allocate(capacity)
        self._token_array[:kept] = tokens[:kept]
        self._previous_array[:, :chained] = previous[:, :chained]
        # The buckets into which one is divided share its chain: searches skip tokens of other contexts anyway.
        self._head_array[:] = np.tile(heads, self._num_buckets // heads.shape[1])

    def _chain(self) -> None:
        """Chain the tokens that are not chained yet."""
        first, end, mask = max(self._num_chained, self.oldest), self.num_tokens, self._capacity - 1
        self._num_chained = end
        if first == end:
            return
        start = min(first, max(first - ORDERS[0] + 1, self._text_start, self.oldest))
        tokens = self._token_array[np.arange(start, end) & mask]
        hashes = _all_hashes(tokens)[:, first - start :]
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
        self._previous_array[rows, positions & mask] = chain
        is_last = np.ones(buckets.shape, np.bool_)
        is_last[:, :-1] = is_first[:, 1:]
        row, column = is_last.nonzero()
        self._head_array[row, buckets[row, column]] = positions[row, column]


def _all_hashes(token_ids: I32) -> np.ndarray[tuple[int, int], np.dtype[np.uint64]]:
    """Return the hashes after each token: one row for each order. Tokens before the first count as 0."""
    wide = token_ids.astype(np.uint64)
    factors = np.asarray(_FACTORS, np.uint64)
    return np.stack([np.convolve(wide, factors[:order])[: len(wide)] for order in ORDERS])
