"""Estimates the probability that a draft token is right, from how often such tokens were right before."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

_NUM_LENGTHS, _NUM_SHARES = 7, 4
_PRIOR_WEIGHT = 6.0  # observations that the prior counts for
_MAX_WEIGHT = 200.0  # older observations fade beyond


class Source(IntEnum):
    """Where a continuation was found."""

    OWN = 0  # in the sequence, after the same tokens
    LOCAL = 1  # in the sequence, shortly after an occurrence from which it deviated
    ANSWERS = 2  # in an earlier answer to the same tenant


# By length of the context: 0, 1, 2, 3 to 4, 5 to 8, 9 to 16, and more tokens.
_PRIORS = {
    Source.OWN: (0.05, 0.3, 0.5, 0.65, 0.8, 0.9, 0.95),
    Source.LOCAL: (0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.95),
    Source.ANSWERS: (0.05, 0.2, 0.4, 0.55, 0.7, 0.8, 0.9),
}
_SHARES = (0.4, 0.6, 0.8, 1.0)  # prior factor of each bucket of a token's share of the votes


_BUCKETS = [0, *(min(_NUM_LENGTHS - 1, (i - 1).bit_length() + 1) for i in range(1, 18))]


def cell_of(source: Source, context_length: int, share: float) -> int:
    """Return the index of the tokens that count as alike.

    `context_length` is how many tokens before it match, and `share` the share of the votes for it.
    """
    length = _BUCKETS[context_length] if context_length < 17 else _NUM_LENGTHS - 1
    bucket = 3 if share > 0.999 else 2 if share >= 0.75 else 1 if share >= 0.5 else 0
    return (source * _NUM_LENGTHS + length) * _NUM_SHARES + bucket


_UNANIMOUS = {source: [cell_of(source, length, 1.0) for length in range(18)] for source in Source}


def unanimous_cells(source: Source, context_length: int, count: int) -> list[int]:
    """Return the cells of `count` successive tokens that get all votes. The first has `context_length`."""
    cells = _UNANIMOUS[source][context_length : context_length + count]
    return cells + _UNANIMOUS[source][-1:] * (count - len(cells))


class Calibration:
    """The share of right tokens of each cell."""

    __slots__ = ("_rights", "_totals", "probabilities")

    def __init__(self) -> None:
        """Start with the priors."""
        self.probabilities = [
            prior * factor for source in Source for prior in _PRIORS[source] for factor in _SHARES
        ]
        self._rights = [_PRIOR_WEIGHT * each for each in self.probabilities]
        self._totals = [_PRIOR_WEIGHT] * len(self.probabilities)

    def observe(self, cells: Sequence[int], num_right: int, *, has_wrong: bool) -> None:
        """Record that the first `num_right` tokens of a draft were right, and whether the next one was wrong.

        `cells` are the cells of the draft's tokens.
        """
        totals, rights = self._totals, self._rights
        for place, cell in enumerate(cells[: num_right + has_wrong]):
            if totals[cell] >= _MAX_WEIGHT:
                totals[cell] /= 2
                rights[cell] /= 2
            totals[cell] = total = totals[cell] + 1.0
            rights[cell] = right = rights[cell] + (place < num_right)
            self.probabilities[cell] = right / total
