"""Continues the longest earlier match of a sequence's last tokens, in the sequence itself or in earlier answers.

Earlier answers are shared by the requests of one tenant only. Each occurrence of the last tokens votes for the token
that followed it, with the length of its match as weight. A draft ends where its estimated probability gets too low.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, NamedTuple

import numpy as np

from tokenspeed_core.api import DrafterContext, Drafts
from tokenspeed_drafters.arrays import I32
from tokenspeed_drafters.calibration import Calibration, Source, cell_of, unanimous_cells
from tokenspeed_drafters.match_index import (
    BYTES_PER_TOKEN,
    MAX_CONTEXT,
    SEPARATOR,
    MatchIndex,
    Occurrence,
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
_LOCAL_WINDOW = 32  # tokens after a deviation in which the match may continue
_LOCAL_LENGTH = 2  # matches elsewhere must be longer to be preferred to a local one
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

    @property
    def num_bytes(self) -> int:
        """Memory of the indexes, in bytes."""
        return BYTES_PER_TOKEN * self._capacity

    @property
    def _capacity(self) -> int:
        return sum(each.index.capacity for each in self._answers.values())

    def of(self, tenant: str) -> EarlierAnswers:
        """Return the answers of a tenant, which becomes the newest."""
        found = self._answers.get(tenant)
        if found is None:
            found = self._answers[tenant] = EarlierAnswers(self._max_per_tenant)
        self._answers.move_to_end(tenant)
        self._evict()
        return found

    def add(self, tenant: str, token_ids: I32) -> None:
        """Add an answer."""
        self.of(tenant).add(token_ids)
        self._evict()

    def _evict(self) -> None:
        while len(self._answers) > 1 and self._capacity > self._max_tokens:
            self._answers.popitem(last=False)


class Deviation(NamedTuple):
    """The position at which a sequence deviated from an occurrence, and the sequence's own position there."""

    position: int
    own_position: int


@dataclass(slots=True)
class FollowedMatches:
    """Occurrences in an index that a sequence has matched so far.

    Their positions are those at which they were found, `num_followed` tokens before the sequence's end.
    """

    index: MatchIndex
    source: Source
    occurrences: list[Occurrence] = field(default_factory=list)
    num_followed: int = 0

    @property
    def length(self) -> int:
        """Length of the longest match."""
        if not self.occurrences:
            return 0
        return min(MAX_CONTEXT, self.num_followed + max([each[1] for each in self.occurrences]))

    def replace(self, occurrences: list[Occurrence]) -> None:
        """Follow other occurrences, which end at the sequence's end."""
        self.occurrences = occurrences
        self.num_followed = 0

    def follow(self, new_tokens: list[int]) -> Deviation | None:
        """Advance over the sequence's newest tokens; drop occurrences that continued otherwise.

        Returns where the best occurrence deviated, if all did. For that, `index` is the sequence's own.
        """
        num_new, index, start = len(new_tokens), self.index, self.num_followed
        kept: list[Occurrence] = []
        best, best_length = None, -1
        for each in self.occurrences:
            position = each[0] + start
            found = index.continuation(position, num_new)
            if found == new_tokens:
                kept.append(each)
            elif not kept and found:
                num_equal = _num_equal(found, new_tokens)
                length = min(MAX_CONTEXT, each[1] + start) + num_equal
                if length > best_length:
                    own_position = index.num_tokens - num_new + num_equal
                    best, best_length = Deviation(position + num_equal, own_position), length
        self.occurrences = kept
        self.num_followed += num_new
        return None if kept else best


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
    continuation, start = matches.index.continuation, matches.num_followed
    found = [continuation(each[0] + start, limit) for each in matches.occurrences]
    lengths = [min(MAX_CONTEXT, each[1] + start) for each in matches.occurrences]
    if [] in found:  # overwritten
        lengths = [*compress(lengths, found)]
        found = [*filter(None, found)]
    if not found:
        return _NO_DRAFT
    longest, first = max(lengths), found[0]
    if found.count(first) == len(found):
        return _draft(first, unanimous_cells(matches.source, longest, limit), calibration)
    weights = [length + 1 for length in lengths]
    token_ids: list[int] = []
    cells: list[int] = []
    for i in range(limit):
        tokens = [each[i] for each in found]
        token, share = _most_voted(tokens, weights)
        if share < 1.0:
            is_kept = [each == token for each in tokens]
            found, weights = [*compress(found, is_kept)], [*compress(weights, is_kept)]
        token_ids.append(token)
        cells.append(cell_of(matches.source, longest + i, share))
    return _draft(token_ids, cells, calibration)


def _draft(token_ids: list[int], cells: list[int], calibration: Calibration) -> Draft:
    """Return a draft of these tokens, up to the end of a text or the first one that is too improbable."""
    if SEPARATOR in token_ids:
        token_ids = token_ids[: token_ids.index(SEPARATOR)]
    probabilities: list[float] = []
    num_expected, probability = 0.0, 1.0
    for cell in cells[: len(token_ids)]:
        estimate = calibration.probabilities[cell]
        probability *= estimate
        if probability < MIN_PROBABILITY:
            break
        probabilities.append(estimate)
        num_expected += probability
    num_tokens = len(probabilities)
    return Draft(token_ids[:num_tokens], probabilities, cells, num_expected)


def _most_voted(tokens: list[int], weights: list[int]) -> tuple[int, float]:
    """Return the token with the most votes, and its share of them."""
    if tokens.count(tokens[0]) == len(tokens):
        return tokens[0], 1.0
    votes: dict[int, int] = {}
    for token, weight in zip(tokens, weights, strict=True):
        votes[token] = votes.get(token, 0) + weight
    token = max(votes, key=votes.__getitem__)  # of equal ones, the newest occurrence's
    return token, votes[token] / sum(weights)


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
        self._draft = _NO_DRAFT
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
        self._draft = vote(self._own, self._calibration, limit)
        if self._answers.occurrences:
            answers = vote(self._answers, self._calibration, limit)
            if answers.num_expected > self._draft.num_expected:
                self._draft = answers
        return self._draft

    def answer(self) -> I32:
        """Return the generated tokens, with some prompt tokens before them."""
        num_tokens = self._num_tokens - self._num_prompt + _NUM_LEADING
        return np.asarray(self._own.index.last(num_tokens), np.int32)

    def _learn(self) -> None:
        """Compare the last draft with the tokens that came."""
        draft, self._draft = self._draft, _NO_DRAFT
        if draft is _NO_DRAFT:
            return
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
                self._deviations = [deviation, *self._deviations[:1]]
            if answers.occurrences:
                answers.follow(new_tokens)
        own_length = own.length
        has_exact = own_length >= _EXACT_LENGTH
        needs_answers = answers.index.num_tokens and answers.length < _EXACT_LENGTH
        if has_exact and not needs_answers:
            return
        context = own.index.context()
        if needs_answers:
            answers.replace(answers.index.find(context))
        if has_exact:
            return
        found = own.index.find(context)
        if found and found[0].length > max(own_length, _LOCAL_LENGTH):
            own.replace(found)
            own.source = Source.OWN
        elif not own.occurrences:
            nearby = self._after_deviations(context.token_ids[-1])
            own.replace(nearby or found)
            own.source = Source.LOCAL if nearby else Source.OWN

    def _after_deviations(self, last: int) -> list[Occurrence]:
        """Return the first occurrence of the last token in the window after each earlier deviation.

        If there is none, assume that the tokens since the newest deviation replaced the same number of tokens.
        """
        index = self._own.index
        found: list[Occurrence] = []
        for each in self._deviations:
            nearby = index.continuation(each.position, self._window_after(each))
            if last in nearby:
                found.append(Occurrence(each.position + nearby.index(last) + 1, 1))
        for each in self._deviations[:1]:
            num_after = index.num_tokens - each.own_position
            if not found and num_after < self._window_after(each):
                found.append(Occurrence(each.position + num_after, 0))
        return found

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
