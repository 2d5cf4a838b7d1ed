"""Chooses how many draft tokens each row verifies, from measured step times and the rows' acceptance.

A step with drafts is worth it if it yields more tokens per second than a plain step of the same rows. Both times are
measured online. An account bounds the loss of wrong predictions: speculation pauses when its steps have cost more time
than they saved, beyond a small share of all time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tokenspeed_core.api.step import F32, I32
from tokenspeed_core.scheduler.drafts import FinishedStep

MAX_LOSS = 0.01  # share of the time of all steps that speculation may lose
MARGIN = 1.02  # predicted speed-up from which drafts are verified
_CREDIT = 2.0  # plain steps that speculation may lose before it has saved anything
_MAX_SAVED = 64.0  # plain steps of savings that later losses may use
_WEIGHT = 0.1  # of the newest step in the running means
_MAX_OUTLIER = 8.0  # a longer step counts as this multiple of the mean
# Draft tokens of the first step with drafts. Later steps have at most twice the number tried before.
_FIRST_DRAFTS = 4
_NUM_PLAIN = 4  # plain steps that are measured before drafts are tried
_PLAIN_INTERVAL = 64  # drafted steps after which plain steps are measured again
_NUM_PLAIN_AGAIN = 2
_PRIOR_ACCEPTANCE = 0.6  # of a token without a drafter's estimate; more if other rows accept more
_PRIOR_WEIGHT = 3.0  # draft tokens that a prior counts for
_FORGET = 0.95  # factor of a row's observations in each of its steps
_FORGET_ALL = 0.99  # factor of the observations of all rows in each step


def size_class(number: int) -> int:
    """Return the class of a number: exact up to 4, then four classes for each power of two."""
    if number <= 4:
        return number
    shift = number.bit_length() - 3
    return 4 * shift + (number >> shift)


class StepCost:
    """Running means of the seconds of steps, by classes of their rows and of their draft tokens."""

    def __init__(self) -> None:
        """Start without measurements."""
        self._seconds: dict[tuple[int, int], float] = {}
        self._num_steps: dict[tuple[int, int], int] = {}
        self._most_tried: dict[int, int] = {}

    def observe(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        """Record a step without prompt tokens."""
        key = (size_class(num_rows), size_class(num_drafts))
        mean = self._seconds.get(key, seconds)
        self._num_steps[key] = count = self._num_steps.get(key, 0) + 1
        weight = max(_WEIGHT, 1 / count)  # an average at first, so that no single step dominates
        self._seconds[key] = mean + weight * (min(seconds, _MAX_OUTLIER * mean) - mean)
        self._most_tried[key[0]] = max(num_drafts, self._most_tried.get(key[0], 0))

    def num_plain(self, num_rows: int) -> int:
        """Return how many steps without drafts were measured with about this many rows."""
        return self._num_steps.get((size_class(num_rows), 0), 0)

    def max_drafts(self, num_rows: int) -> int:
        """Return the maximum number of draft tokens for which a time can be predicted."""
        return max(_FIRST_DRAFTS, 2 * self._most_tried.get(size_class(num_rows), 0))

    def plain(self, num_rows: int) -> float:
        """Return the seconds of a step without drafts; 0 if none was measured."""
        return self._seconds.get((size_class(num_rows), 0), 0.0)

    def with_drafts(self, num_rows: int, max_drafts: int) -> F32:
        """Return the seconds of steps with 0 to `max_drafts` draft tokens.

        An unmeasured number counts as its next smaller measured one, so that it is tried; more tokens never count as
        faster.
        """
        rows = size_class(num_rows)
        by_class: list[float] = []
        seconds = self.plain(num_rows)
        for each in range(size_class(max_drafts) + 1):
            seconds = max(seconds, self._seconds.get((rows, each), 0.0))
            by_class.append(seconds)
        classes = [size_class(number) for number in range(max_drafts + 1)]
        return np.asarray(by_class, np.float32)[classes]


def choose_counts(probabilities: F32, seconds: F32) -> tuple[I32, float]:
    """Return the number of draft tokens of each row, and the expected tokens of all.

    `probabilities` [S, K] say how probable a draft token is if all before it in its row are right, 0 after the last.
    `seconds` [N + 1] are the times of steps with 0 to N draft tokens. The counts maximize expected tokens per second;
    they are 0 unless that exceeds the rate without drafts by MARGIN.
    """
    num_rows = len(probabilities)
    all_right = np.multiply.accumulate(probabilities, axis=1)
    # Within a row the values never grow, so the best n of them are the first ones of each row.
    order = np.argsort(-all_right, axis=None, kind="stable")[: len(seconds) - 1]
    gains = np.concatenate(([0.0], np.cumsum(all_right.ravel()[order])))
    rates = (num_rows + gains) / seconds[: len(gains)]
    best = int(np.argmax(rates))
    if rates[best] <= MARGIN * rates[0]:
        best = 0
    rows = order[:best] // max(1, probabilities.shape[1])
    return np.bincount(rows, minlength=num_rows).astype(np.int32), float(gains[best])


@dataclass(slots=True)
class Account:
    """Time that speculation has saved, in plain steps, within bounds."""

    balance: float = _CREDIT
    pause: int = 0  # steps until drafts are tried again
    _next_pause: int = 16

    @property
    def is_open(self) -> bool:
        """Whether drafts may be verified now."""
        return self.pause == 0 and self.balance > 0.0

    def earn(self) -> None:
        """Record a step: its share of time may be lost."""
        self.balance = min(_MAX_SAVED, self.balance + MAX_LOSS)
        self.pause = max(0, self.pause - 1)

    def record(self, saved: float) -> None:
        """Record the plain steps that a step with drafts saved; negative: lost."""
        self.balance = min(_MAX_SAVED, self.balance + saved)
        if self.balance >= _CREDIT:  # not after one step, whose time may be shorter by chance
            self._next_pause = 16
        elif self.balance <= 0.0:
            self.pause = self._next_pause
            self._next_pause = min(1024, 2 * self._next_pause)


class AdaptiveDepth:
    """The depth of each row by its own acceptance and by the measured cost of steps."""

    def __init__(self, max_num_seqs: int, max_drafts: int) -> None:
        """Start without measurements."""
        self.cost = StepCost()
        self.account = Account()
        self._max_drafts = max_drafts
        # Draft tokens that were accepted and that were expected to be, the newest with most weight.
        self._accepted = np.zeros(max_num_seqs, np.float32)
        self._expected = np.zeros(max_num_seqs, np.float32)
        # Draft tokens that were verified until the first wrong one of each step, and that one.
        self._tried = np.zeros(max_num_seqs, np.float32)
        self._step_expected = np.zeros(max_num_seqs, np.float32)
        # The same of all rows, from which the acceptance of a new row is expected.
        self._accepted_by_all = 0.0
        self._tried_by_all = 0.0
        self._num_accepted = 0
        self._since_plain = 0
        self._num_plain_wanted = 0  # plain steps to measure before drafts are verified again
        self._spent = 0.0  # seconds at the end of sequences, not yet in the account
        self._is_drafting = False  # the drafter was asked for the step that finishes next

    def max_drafts(self, num_rows: int) -> int:
        """Return the maximum number of draft tokens of a row; 0 while drafts cost more than they save."""
        is_on = (
            self.account.is_open
            and not self._num_plain_wanted
            and self.cost.num_plain(num_rows) >= _NUM_PLAIN
        )
        return self._max_drafts if is_on else 0

    def max_seconds(self, num_rows: int) -> float:
        """Return how long the drafter may take to begin sequences before a step, in seconds."""
        return self.account.balance * self.cost.plain(num_rows)

    def spend(self, seconds: float) -> None:
        """Record the time of the drafter at the end of a sequence, which no step with drafts has."""
        self._spent += seconds

    def choose(
        self, slots: I32, counts: I32, probabilities: F32 | None, num_rows: int, num_left: int
    ) -> I32:
        """Return how many of the proposed tokens of some rows to verify, `num_left` in all at most.

        `counts` [S] are the proposed tokens, `probabilities` one for each in row order. The step has `num_rows`
        decode rows.
        """
        has_token = np.arange(self._max_drafts) < counts[:, np.newaxis]
        estimates = np.zeros(has_token.shape, np.float32)
        if probabilities is None:
            by_all = (self._accepted_by_all + _PRIOR_ACCEPTANCE * _PRIOR_WEIGHT) / (
                self._tried_by_all + _PRIOR_WEIGHT
            )
            # A low rate of other rows must not keep a new one from being tried.
            prior = max(_PRIOR_ACCEPTANCE, by_all)
            rate = (self._accepted[slots] + prior * _PRIOR_WEIGHT) / (
                self._tried[slots] + _PRIOR_WEIGHT
            )
            estimates += rate[:, np.newaxis]
            estimates[~has_token] = 0.0
        else:
            ratio = (self._accepted[slots] + _PRIOR_WEIGHT) / (
                self._expected[slots] + _PRIOR_WEIGHT
            )
            estimates[has_token] = probabilities
            estimates *= np.minimum(ratio, 1.25)[:, np.newaxis]
            np.minimum(estimates, 0.99, out=estimates)
        self._is_drafting = True
        max_drafts = min(int(counts.sum()), num_left, self.cost.max_drafts(num_rows))
        seconds = self.cost.with_drafts(num_rows, max_drafts)
        padded = np.zeros((num_rows, self._max_drafts), np.float32)
        padded[: len(slots)] = estimates
        chosen = choose_counts(padded, seconds)[0][: len(slots)]
        is_verified = np.arange(self._max_drafts) < chosen[:, np.newaxis]
        all_right = np.multiply.accumulate(estimates, axis=1)
        self._step_expected[slots] = np.where(is_verified, all_right, 0.0).sum(axis=1)
        return chosen

    def begin(self, slot: int) -> None:
        """Discard the observations of a slot: another sequence has it."""
        for column in (self._accepted, self._expected, self._tried):
            column[slot] = 0.0

    def observe(self, slots: I32, num_drafts: I32, num_accepted: I32) -> None:
        """Record how many draft tokens of some rows the model accepted."""
        for column in (self._accepted, self._expected, self._tried):
            column[slots] *= _FORGET
        has_drafts = num_drafts > 0
        drafted = slots[has_drafts]
        accepted = num_accepted[has_drafts]
        tried = np.minimum(accepted + 1, num_drafts[has_drafts])
        self._accepted[drafted] += accepted
        self._tried[drafted] += tried
        self._accepted_by_all = _FORGET_ALL * self._accepted_by_all + float(accepted.sum())
        self._tried_by_all = _FORGET_ALL * self._tried_by_all + float(tried.sum())
        self._expected[drafted] += self._step_expected[drafted]
        self._num_accepted += int(num_accepted.sum())

    def finish_step(self, step: FinishedStep) -> None:
        """Record the duration of a step. Steps with prompt tokens are not compared with others."""
        num_accepted, is_drafting = self._num_accepted, self._is_drafting
        self._num_accepted, self._is_drafting = 0, False
        num_rows, seconds = step.num_rows, step.seconds
        if step.num_chunk_tokens or not num_rows:
            return
        self.account.earn()
        if self._spent and (plain := self.cost.plain(num_rows)):
            self.account.balance -= self._spent / plain
            self._spent = 0.0
        num_drafts = step.num_tokens - num_rows
        # A step for which the drafter found nothing is not a plain one: asking took time.
        if not num_drafts and not is_drafting:
            # Plain steps follow each other with several in flight. The first and the last take another time.
            if step.is_steady:
                self.cost.observe(num_rows, 0, seconds)
                self._since_plain, self._num_plain_wanted = 0, max(0, self._num_plain_wanted - 1)
            return
        if num_drafts:
            self.cost.observe(num_rows, num_drafts, seconds)
        self._since_plain += 1
        if self._since_plain >= _PLAIN_INTERVAL:
            self._since_plain, self._num_plain_wanted = 0, _NUM_PLAIN_AGAIN
        plain = self.cost.plain(num_rows)
        if not plain:  # fewer rows than the drafts were chosen for
            return
        saved = plain * (1 + num_accepted / num_rows) - min(seconds, _MAX_OUTLIER * plain)
        self.account.record(saved / plain)
