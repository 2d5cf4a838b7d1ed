"""Continues the longest earlier match of a sequence's last tokens, in the sequence itself or in earlier answers.

Earlier answers are shared by the requests of one tenant only. Each occurrence of the last tokens votes for the token
that followed it. A draft ends where its estimated probability gets too low.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from operator import attrgetter, mul
from typing import Any, NamedTuple

import numpy as np

from tokenspeed_core.api import DrafterContext, Drafts
from tokenspeed_drafters.arrays import I32
from tokenspeed_drafters.calibration import Calibration, Source, cell_of, unanimous_cells
from tokenspeed_drafters.match_index import (
    BYTES_PER_TOKEN,
    MAX_CONTEXT,
    NO_MATCHES,
    SEPARATOR,
    Matches,
    MatchIndex,
)
from tokenspeed_drafters.options import take_integers

MAX_INDEXED_TOKENS = 131_072  # of a sequence, the newest
MIN_PROBABILITY = 0.02  # that all tokens of a draft are right
_DEFAULTS = {
    "suffix_answers_per_key": 262_144,  # tokens
    "suffix_answers": 1_048_576,  # tokens, of all tenants
}
_MIN_ANSWERS, _MAX_ANSWERS = 256, 2**27
_NUM_LEADING = 8  # prompt tokens kept before an answer, so that its first tokens can be found
_MAX_DEVIATIONS = 3  # that a sequence remembers
_LOCAL_WINDOW = 32  # tokens after a deviation in which the match may continue
_EXACT_LENGTH = 8  # a match of this length is followed without new searches


def read_options(options: Mapping[str, Any]) -> tuple[int, int]:
    """Return the maximum tokens of earlier answers, per tenant and in total. Raises ValueError."""
    found = take_integers(options, _DEFAULTS, _MIN_ANSWERS, _MAX_ANSWERS)
    per_key, in_all = found["suffix_answers_per_key"], found["suffix_answers"]
    if "suffix_answers_per_key" not in options:
        per_key = min(per_key, in_all)
    if per_key > in_all:
        raise ValueError(
            f"suffix_answers_per_key is {per_key}, expected at most suffix_answers ({in_all})"
        )
    return per_key, in_all


def check(options: Mapping[str, Any]) -> None:
    """Raise ValueError for wrong options."""
    read_options(options)


class EarlierAnswers:
    """The earlier answers of one tenant, with an index of their tokens."""

    def __init__(self, max_tokens: int) -> None:
        """Start empty."""
        self.index = MatchIndex(1 << (max_tokens.bit_length() - 1))
        self.calibration = Calibration()

    def add(self, token_ids: I32) -> None:
        """Add an answer with the tokens before it."""
        self.index.append_all(np.append(token_ids, np.int32(SEPARATOR)))


class Tenants:
    """The earlier answers of each tenant. The tenant that was idle the longest is dropped when memory is full."""

    def __init__(self, max_per_tenant: int, max_tokens: int) -> None:
        """Start without tenants. Both limits are in tokens."""
        self._max_per_tenant = max_per_tenant
        self._max_tokens = max_tokens
        self._answers: OrderedDict[str, EarlierAnswers] = OrderedDict()
        self._capacity = 0  # of all indexes, in tokens; a sum over many tenants would take long

    @property
    def num_bytes(self) -> int:
        """Memory of the indexes, in bytes."""
        return BYTES_PER_TOKEN * self._capacity

    def of(self, tenant: str) -> EarlierAnswers:
        """Return the answers of a tenant, which becomes the newest."""
        found = self._answers.get(tenant)
        if found is None:
            found = self._answers[tenant] = EarlierAnswers(self._max_per_tenant)
            self._capacity += found.index.capacity
        self._answers.move_to_end(tenant)
        self._evict()
        return found

    def add(self, tenant: str, token_ids: I32) -> None:
        """Add an answer."""
        answers = self.of(tenant)
        before = answers.index.capacity
        answers.add(token_ids)
        self._capacity += answers.index.capacity - before
        self._evict()

    def _evict(self) -> None:
        while len(self._answers) > 1 and self._capacity > self._max_tokens:
            _, dropped = self._answers.popitem(last=False)
            self._capacity -= dropped.index.capacity


class Deviation(NamedTuple):
    """The position at which a sequence deviated from an occurrence, and the sequence's own position there."""

    position: int
    own_position: int


@dataclass(slots=True)
class FollowedMatches:
    """The positions in an index that continue earlier occurrences of a sequence's last tokens.

    `length` is how many of these tokens precede the newest position.
    """

    index: MatchIndex
    source: Source
    positions: list[int] = field(default_factory=list)
    length: int = 0

    def replace(self, found: Matches, source: Source) -> None:
        """Follow other matches."""
        self.positions, self.length = found
        self.source = source

    def follow(self, new_tokens: list[int]) -> Deviation | None:
        """Advance over the sequence's newest tokens; drop matches that continued otherwise.

        Returns where the newest match deviated, if all did. The result is valid only if `index` is the sequence's own.
        """
        positions, index, num_new = self.positions, self.index, len(new_tokens)
        self.positions = [
            position + num_new
            for position in positions
            if index.continuation(position, num_new) == new_tokens
        ]
        if self.positions:
            self.length = min(MAX_CONTEXT, self.length + num_new)
            return None
        self.length = 0
        if not positions:
            return None
        num_equal = _num_equal(index.continuation(positions[0], num_new), new_tokens)
        return Deviation(positions[0] + num_equal, index.num_tokens - num_new + num_equal)


@dataclass(slots=True)
class Draft:
    """A proposed continuation. `cells` are those of the calibration."""

    token_ids: list[int]
    probabilities: list[float]
    cells: list[int]
    num_expected: float  # right tokens, on average


_NO_DRAFT = Draft([], [], [], 0.0)


def vote(matches: FollowedMatches, calibration: Calibration, limit: int) -> Draft:
    """Return the continuation on which most occurrences agree."""
    continuation, source, length = matches.index.continuation, matches.source, matches.length
    found = [continuation(position, limit) for position in matches.positions]
    if [] in found:  # overwritten
        found = [*filter(None, found)]
    if not found:
        return _NO_DRAFT
    cells: list[int] = []
    for i in range(limit):
        num_votes = len(found)
        if found.count(found[0]) == num_votes:
            cells += unanimous_cells(source, length + i, limit - i)
            break
        tokens = [each[i] for each in found]
        token = max(tokens, key=tokens.count)  # with equal votes, that of the newest match
        found = [each for each in found if each[i] == token]
        cells.append(cell_of(source, length + i, len(found) / num_votes))
    return _draft(found[0], cells, calibration)


def _draft(token_ids: list[int], cells: list[int], calibration: Calibration) -> Draft:
    """Return a draft of these tokens, up to the end of a text or the first one that is too improbable."""
    if SEPARATOR in token_ids:
        token_ids = token_ids[: token_ids.index(SEPARATOR)]
    estimates = [*map(calibration.probabilities.__getitem__, cells[: len(token_ids)])]
    chances = [*accumulate(estimates, mul)]
    if chances and chances[-1] < MIN_PROBABILITY:
        num_tokens = sum(chance >= MIN_PROBABILITY for chance in chances)
        del token_ids[num_tokens:], estimates[num_tokens:], chances[num_tokens:]
    return Draft(token_ids, estimates, cells, sum(chances))


class SuffixSequence:
    """A running sequence: its index, and the matches that it continues, in itself and in earlier answers."""

    def __init__(
        self, token_ids: I32, num_prompt_tokens: int, tenant: str, answers: EarlierAnswers
    ) -> None:
        """Index the tokens of a sequence."""
        self.tenant = tenant
        self._calibration = answers.calibration
        self._num_prompt = num_prompt_tokens
        self._num_tokens = len(token_ids)
        index = MatchIndex(MAX_INDEXED_TOKENS)
        index.append_all(token_ids)
        self._own = FollowedMatches(index, Source.OWN)
        self._answers = FollowedMatches(answers.index, Source.ANSWERS)
        self._new_tokens: list[int] = []  # since the last proposal
        self._drafts: list[Draft] = []
        self._deviations: list[Deviation] = []  # the newest first

    def extend(self, token_ids: list[int]) -> None:
        """Add generated tokens."""
        self._own.index.extend(token_ids)
        self._num_tokens += len(token_ids)
        self._new_tokens += token_ids

    def propose(self, limit: int) -> Draft:
        """Return a draft of at most `limit` tokens; it may be empty."""
        self._learn()
        self._follow()
        self._drafts = [
            vote(each, self._calibration, limit)
            for each in (self._own, self._answers)
            if each.positions
        ]
        return max(self._drafts, key=attrgetter("num_expected"), default=_NO_DRAFT)

    def answer(self) -> I32:
        """Return the generated tokens, with some prompt tokens before them."""
        num_tokens = self._num_tokens - self._num_prompt + _NUM_LEADING
        return np.asarray(self._own.index.last(num_tokens), np.int32)

    def _learn(self) -> None:
        """Compare the last drafts with the tokens that came."""
        for draft in self._drafts:
            num_right = _num_equal(draft.token_ids, self._new_tokens)
            num_known = min(len(draft.token_ids), len(self._new_tokens))
            self._calibration.observe(draft.cells, num_right, has_wrong=num_right < num_known)

    def _follow(self) -> None:
        """Advance all matches over the new tokens, and search again if longer matches are possible."""
        new_tokens, own, answers = self._new_tokens, self._own, self._answers
        self._new_tokens = []
        if new_tokens:
            deviation = own.follow(new_tokens)
            if deviation is not None:
                self._deviations = [deviation, *self._deviations[: _MAX_DEVIATIONS - 1]]
            answers.follow(new_tokens)
        if own.length >= _EXACT_LENGTH:
            answers.replace(NO_MATCHES, Source.ANSWERS)
            return
        context = own.index.context()
        if answers.index.num_tokens and answers.length < _EXACT_LENGTH:
            answers.replace(answers.index.find(context), Source.ANSWERS)
        found = own.index.find(context)
        if not own.positions:
            own.replace(self._after_deviations(context.token_ids[-1]), Source.LOCAL)
        if found.length > own.length and (
            not own.positions
            or self._chance(Source.OWN, found.length) >= self._chance(own.source, own.length)
        ):
            own.replace(found, Source.OWN)

    def _chance(self, source: Source, length: int) -> float:
        """Return the estimated probability of a token after matches of this length that agree."""
        return self._calibration.probabilities[cell_of(source, length, 1.0)]

    def _after_deviations(self, last: int) -> Matches:
        """Return the first occurrence of the last token in the window after each earlier deviation.

        If there is none, assume that the tokens since the newest deviation replaced the same number of tokens.
        """
        index = self._own.index
        found: list[int] = []
        for each in self._deviations:
            nearby = index.continuation(each.position, self._window_after(each))
            if last in nearby:
                found.append(each.position + nearby.index(last) + 1)
        if found:
            return Matches(found, 1)
        for each in self._deviations[:1]:
            num_after = index.num_tokens - each.own_position
            if num_after < self._window_after(each):
                found.append(each.position + num_after)
        return Matches(found, 0)

    def _window_after(self, deviation: Deviation) -> int:
        """Return the length of the window after a deviation, without the tokens since then."""
        is_in_prompt = deviation.position < self._num_prompt
        end = self._num_prompt if is_in_prompt else deviation.own_position
        return max(0, min(_LOCAL_WINDOW, end - deviation.position))


def _num_equal(one: list[int], other: list[int]) -> int:
    """Return the number of equal tokens at the start."""
    if one == other[: len(one)]:
        return len(one)
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return i
    return min(len(one), len(other))


class SuffixDrafter:
    """Drafts for all running sequences."""

    def __init__(self, context: DrafterContext) -> None:
        """Start without sequences. Raises ValueError for wrong options."""
        self._tenants = Tenants(*read_options(context.options))
        self._sequences: dict[int, SuffixSequence] = {}

    def begin(self, slot: int, token_ids: I32, num_prompt_tokens: int, tenant: str) -> None:
        """Start a sequence."""
        answers = self._tenants.of(tenant)
        self._sequences[slot] = SuffixSequence(token_ids, num_prompt_tokens, tenant, answers)

    def extend(self, slots: I32, counts: I32, token_ids: I32) -> None:
        """Add generated tokens."""
        tokens, start = token_ids.tolist(), 0
        for slot, count in zip(slots.tolist(), counts.tolist(), strict=True):
            self._sequences[slot].extend(tokens[start : start + count])
            start += count

    def propose(self, slots: I32, max_drafts: I32) -> Drafts:
        """Return the most probable continuation of each sequence."""
        drafts = [
            self._sequences[slot].propose(limit)
            for slot, limit in zip(slots.tolist(), max_drafts.tolist(), strict=True)
        ]
        return Drafts(
            np.asarray([len(each.token_ids) for each in drafts], np.int32),
            np.asarray([token for each in drafts for token in each.token_ids], np.int32),
            np.asarray([value for each in drafts for value in each.probabilities], np.float32),
        )

    def end(self, slot: int) -> None:
        """Forget a sequence, and keep its answer for later sequences of the same tenant."""
        sequence = self._sequences.pop(slot)
        self._tenants.add(sequence.tenant, sequence.answer())
