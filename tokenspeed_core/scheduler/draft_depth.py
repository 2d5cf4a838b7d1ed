"""Chooses how many draft tokens each row verifies, from measured step times and the rows' acceptance.

In a *plain* step, the drafter is not called. Drafts pay off if steps with drafts yield more tokens per second than plain
steps of the same rows. Step times are measured online, from the result of one step to the result of the next, so they
include the drafter and all other work of the host. An `Account` bounds the loss: drafting pauses when the budget is used
up, and resumes when the budget has grown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np

from tokenspeed_core.api.step import F32, I32, I64
from tokenspeed_core.scheduler.drafts import FinishedStep
from tokenspeed_core.scheduler.prompt_cost import PromptCost
from tokenspeed_core.scheduler.step_cost import MAX_OUTLIER, RowsCost, StepCost

F64 = np.ndarray[Any, np.dtype[np.float64]]

MAX_LOSS = 0.01  # share of the time of all steps that speculation may lose
MARGIN = 1.02  # predicted speed-up from which drafts are verified
# Budget with which speculation is tried, in plain steps: enough for a few steps with wrong draft tokens.
STAKE = 2.0
FIRST_PAUSE = ceil(STAKE / MAX_LOSS)  # steps
# Largest budget, in steps. Savings may raise it to the time of four steps with drafts; plain steps raise it to four
# plain steps.
_MAX_BALANCE = 4.0
_MAX_LOST = 32.0  # largest loss that the account keeps, in plain steps
_NUM_MEASURED = 16  # last steps of a pause, which are measured
# Draft tokens of the first step with drafts. Later steps have at most twice the number tried before.
_FIRST_DRAFTS = 4
_NUM_PLAIN = 4  # plain steps that are measured before drafts are tried
_PLAIN_INTERVAL = 256  # drafted steps after which plain steps are measured again
_NUM_PLAIN_AGAIN = 2
_RETRY_INTERVAL = 64  # drafted steps after which slow numbers of draft tokens are tried again
_MAX_SKIPPED = 15  # steps after an early proposal that was not worth waiting for
_PRIOR_ACCEPTANCE = 0.6  # of a token without a drafter's estimate; more if other rows accept more
_PRIOR_WEIGHT = 3.0  # draft tokens that a prior counts for
_MAX_RATIO = 1.25  # of a row's acceptance to the drafter's estimates
_MAX_ESTIMATE = 0.99
_LONG_PROMPT = 512  # prompt tokens; from here on a draft model adds little to a step's time
_MAX_FOLLOWED = 16  # steps with prompts after which a draft model runs before its time is charged
_MAX_PROMPT_COST = 16.0  # largest cost of a draft model in a step with prompts, in plain steps
# From the plan of a step with prompts until the cost of its draft model is charged: it may be planned while one step is
# in flight, delays the step after it, and is charged with the next decodes.
_STEPS_TO_CHARGE = 4
_FORGET = 0.95  # factor of a row's observations in each of its steps with draft tokens
_FADE = 0.98  # the same whenever none of its draft tokens are chosen, so that it is tried again
_MAX_TRIED_BY_ALL = 100.0  # newest draft tokens of all rows that count for their acceptance


def choose_counts(probabilities: F32, num_rows: int, seconds: Sequence[float]) -> tuple[I32, F64]:
    """Return the number of draft tokens of each row, and how many of them are expected to be accepted.

    `probabilities` [S, K] has the acceptance probability of each draft token, given that all earlier draft tokens of its
    row are accepted; 0 after the last.
    The step has `num_rows` rows, of which S may have draft tokens. `seconds` [N + 1] are the times of steps with 0 to N
    draft tokens. The counts maximize expected tokens per second; they are 0 unless that exceeds the rate without draft
    tokens by MARGIN.
    """
    size, width = probabilities.shape
    gains = np.multiply.accumulate(probabilities, axis=1).ravel()
    # Within a row the values never grow, so the best n of them are the first ones of each row.
    order = (-gains).argsort(kind="stable")[: len(seconds) - 1]
    gains = gains[order]
    rates = gains.cumsum()
    rates += num_rows
    rates /= np.asarray(seconds[1 : len(rates) + 1], np.float32)
    best = int(rates.argmax()) + 1 if len(rates) else 0
    if not best or rates.item(best - 1) <= MARGIN * num_rows / seconds[0]:
        return np.zeros(size, np.int32), np.zeros(size)
    rows = order[:best] // width
    counts = np.bincount(rows, minlength=size).astype(np.int32)
    return counts, np.bincount(rows, gains[:best], minlength=size).astype(np.float64)


def choose_count(probabilities: Sequence[float], seconds: Sequence[float]) -> tuple[int, float]:
    """Return the result of `choose_counts` for one row. NumPy calls would take most of the time."""
    best, best_gain, best_rate = 0, 0.0, MARGIN / seconds[0]
    gain, all_right = 0.0, 1.0
    for number, (probability, each) in enumerate(zip(probabilities, seconds[1:], strict=False), 1):
        all_right *= probability
        gain += all_right
        rate = (1 + gain) / each
        if rate > best_rate:
            best, best_gain, best_rate = number, gain, rate
    return best, best_gain


@dataclass(slots=True)
class Account:
    """The budget of speculation: the time that drafts may lose, in plain steps. An account starts with a pause."""

    balance: float = 0.0
    pause: int = FIRST_PAUSE  # steps until drafts are tried
    is_first_pause: bool = True

    def earn(self) -> None:
        """Record a step, which adds MAX_LOSS to the budget, up to its maximum."""
        if self.balance < _MAX_BALANCE:
            self.balance += MAX_LOSS
        if self.pause:
            self.pause -= 1
        else:
            self.is_first_pause = False

    def pass_steps(self, num_steps: int) -> None:
        """Record steps of a pause, fewer than are left of it."""
        earned = min(_MAX_BALANCE, self.balance + num_steps * MAX_LOSS)
        self.balance = max(self.balance, earned)
        self.pause -= num_steps

    def record(self, saved: float, cost: float = 1.0) -> None:
        """Record a step that took as long as `cost` plain steps and saved `saved` of them; negative: lost.

        If the budget is used up, drafts pause until it is STAKE.
        """
        limit = max(self.balance, _MAX_BALANCE * cost)
        self.balance = max(-_MAX_LOST, min(limit, self.balance + saved))
        if self.pause or self.balance <= 0.0:
            self.pause = max(self.pause, ceil((STAKE - self.balance) / MAX_LOSS))


class AdaptiveDepth:
    """The depth of each row by its own acceptance and by the measured cost of steps."""

    def __init__(self, max_num_seqs: int, max_drafts: int, *, is_model: bool = False) -> None:
        """Start without measurements. `is_model`: a model makes the draft tokens, after the step before theirs."""
        self._is_model = is_model
        self.cost = StepCost(max_num_seqs, max_drafts)
        self.account = Account()
        self._max_drafts = max_drafts
        self._places = np.arange(max_drafts, dtype=np.int32)
        # Numbers of draft tokens of each slot: accepted, expected to be accepted, and verified until the first wrong one
        # of each step. The newest have most weight.
        self._history = np.zeros((3, max_num_seqs), np.float32)
        # Of each slot, the draft tokens that are expected to be accepted in the planned step, and in the finished one.
        self._step_expected = np.zeros(max_num_seqs, np.float32)
        self._finished_expected = self._step_expected.copy()
        # The same of all rows, from which the acceptance of a new row is expected.
        self._accepted_by_all = 0.0
        self._tried_by_all = 0.0
        self._since_plain = 0
        self._num_plain_wanted = 0  # plain steps to measure before drafts are verified again
        # Seconds to begin and end sequences, not yet in the account: of this step, and of earlier steps that were not
        # compared with plain ones.
        self._spent = self._spent_before = 0.0
        self._has_proposed_early = (
            False  # the drafter proposed tokens before the step that finishes next was collected
        )
        # Proposals were worth waiting for. The step with drafts that follows pays for all that was spent before it.
        self._is_waiting = False
        # Steps before the drafter proposes early again: in all, and left. Each rejected proposal about doubles them.
        self._num_skipped = self._num_to_skip = 0
        self._is_drafting = False  # the step that finishes next waited for a drafter on the host
        self._was_drafting = False  # the step before that did, or had draft tokens
        self._prompts = PromptCost()
        self._owed = 0.0  # seconds that a draft model added to steps with prompts, not yet charged
        # Steps until a draft model follows another prompt, because the cost of the last one is not charged yet.
        self._num_to_prompt = 0
        self._num_followed = 0  # steps with prompts after which a draft model ran
        self._last_pass = 0  # tokens of the draft model's pass after the last step, if any
        self._plain = 0.0  # seconds of the plain steps that were measured last
        self.num_unmeasured = 0  # next steps of a pause that are not measured, and pay for nothing

    @property
    def is_paused(self) -> bool:
        """Whether drafting pauses until its budget is STAKE again."""
        return self.account.pause > 0

    @property
    def budget(self) -> float:
        """The time that draft tokens may still lose, in plain steps; negative: the loss beyond it."""
        return self.account.balance

    def follows_prompts(self, num_tokens: int) -> bool:
        """Return whether a draft model runs after a step with prompts, of which the longest has this many tokens.

        In the first pause, it runs after a few steps with long prompts, because later prompts may begin with the same
        tokens. After that pause, it does so until a plain step is measured, because its time cannot be charged before.
        """
        account = self.account
        if not self._plain or (account.is_first_pause and account.pause):
            return num_tokens >= _LONG_PROMPT and self._num_followed < _MAX_FOLLOWED
        if account.pause or self._num_to_prompt:
            return False
        cost = self._prompts.newest
        if cost is None or cost > account.balance * self._plain:
            self._num_to_prompt = _STEPS_TO_CHARGE
        return True

    def max_drafts(self, num_rows: int) -> int:
        """Return the maximum number of draft tokens of a row; 0 while drafts cost more than they save."""
        if self.account.pause or self._num_plain_wanted or self._num_to_skip:
            return 0
        return self._max_drafts if self.cost.of(num_rows).num_plain >= _NUM_PLAIN else 0

    def max_seconds(self, num_rows: int) -> float:
        """Return how long the drafter may still take to begin sequences before a step, in seconds."""
        max_seconds = self.account.balance * self.cost.of(num_rows).plain
        return max_seconds - self._spent - self._spent_before

    def spend(self, seconds: float) -> None:
        """Record the drafter's time to begin or end sequences. The step that finishes next includes it."""
        self._spent += seconds
        self.num_unmeasured = 0

    def choose(
        self, slots: I64, counts: I32, probabilities: F32 | None, num_rows: int, num_left: int
    ) -> I32:
        """Return how many of the proposed tokens of some rows to verify, `num_left` in all at most.

        `counts` [S] are the proposed tokens, `probabilities` one for each in row order. The step has `num_rows`
        decode rows.
        """
        self._is_drafting = not self._is_model
        cost = self.cost.of(num_rows)
        seconds = cost.with_drafts(self._most(counts, num_left, cost))
        chosen, self._step_expected[slots] = self._choose(
            slots, counts, probabilities, num_rows, seconds
        )
        return chosen

    def are_worth_waiting(
        self, slots: I64, counts: I32, probabilities: F32 | None, num_rows: int, num_left: int
    ) -> bool:
        """Return whether any of the proposed tokens are worth a step that does not overlap with others."""
        self._has_proposed_early = True
        cost = self.cost.of(num_rows)
        seconds = cost.with_drafts(self._most(counts, num_left, cost))
        seconds[0] = cost.plain
        chosen, _ = self._choose(slots, counts, probabilities, num_rows, seconds)
        self._is_waiting = any(chosen.tolist())
        self._num_skipped = 0 if self._is_waiting else min(2 * self._num_skipped + 1, _MAX_SKIPPED)
        self._num_to_skip = self._num_skipped
        return self._is_waiting

    def _most(self, counts: I32, num_left: int, cost: RowsCost) -> int:
        """Return the maximum draft tokens of a step."""
        num_proposed: int = sum(counts.tolist())
        return min(num_proposed, num_left, max(_FIRST_DRAFTS, 2 * cost.most_tried))

    def _choose(
        self,
        slots: I64,
        counts: I32,
        probabilities: F32 | None,
        num_rows: int,
        seconds: list[float],
    ) -> tuple[I32, F64]:
        """Return the results of `choose_counts` for these rows. Rows without draft tokens forget a little."""
        if num_rows == 1:
            row = self._history[:, slots[0]].tolist()
            estimates = self._estimates_of_row(row, counts.item(0), probabilities)
            count, expected = choose_count(estimates, seconds)
            if not count:
                self._history[:, slots[0]] *= _FADE
            return np.array([count], np.int32), np.array([expected])
        estimates_of_rows = self._estimates(slots, counts, probabilities)
        chosen, gains = choose_counts(estimates_of_rows, num_rows, seconds)
        self._history[:, slots[chosen == 0]] *= _FADE
        return chosen, gains

    def _prior(self) -> float:
        """Return the acceptance that is assumed for a new row."""
        by_all = (self._accepted_by_all + _PRIOR_ACCEPTANCE * _PRIOR_WEIGHT) / (
            self._tried_by_all + _PRIOR_WEIGHT
        )
        # A low rate of other rows must not keep a new one from being tried.
        return max(_PRIOR_ACCEPTANCE, by_all)

    def _estimates(self, slots: I64, counts: I32, probabilities: F32 | None) -> F32:
        """Return each draft token's probability, given that all before it are right, [S, K]; 0 after the last of its row."""
        has_token = self._places < counts[:, np.newaxis]
        estimates = np.zeros(has_token.shape, np.float32)
        accepted, expected, tried = self._history.take(slots, 1)
        if probabilities is None:
            rate = (accepted + self._prior() * _PRIOR_WEIGHT) / (tried + _PRIOR_WEIGHT)
            np.copyto(estimates, rate[:, np.newaxis], where=has_token)
            return estimates
        estimates[has_token] = probabilities
        ratio = (accepted + _PRIOR_WEIGHT) / (expected + _PRIOR_WEIGHT)
        estimates *= np.minimum(ratio, np.float32(_MAX_RATIO))[:, np.newaxis]
        return np.minimum(estimates, np.float32(_MAX_ESTIMATE), out=estimates)

    def _estimates_of_row(
        self, history: list[float], count: int, probabilities: F32 | None
    ) -> list[float]:
        """Return the same as `_estimates`, for one row."""
        accepted, expected, tried = history
        if probabilities is None:
            rate = (accepted + self._prior() * _PRIOR_WEIGHT) / (tried + _PRIOR_WEIGHT)
            return [rate] * count
        ratio = min(_MAX_RATIO, (accepted + _PRIOR_WEIGHT) / (expected + _PRIOR_WEIGHT))
        return [min(_MAX_ESTIMATE, ratio * each) for each in probabilities.tolist()]

    def begin(self, slot: int) -> None:
        """Discard the observations of a slot: another sequence has it."""
        self._history[:, slot] = 0.0

    def observe(self, slots: I64, num_drafts: I32, num_accepted: I32) -> None:
        """Record how many draft tokens of some rows the model accepted."""
        if len(slots) == 1:
            in_all = num_accepted.item(0)
            num_tried = min(in_all + 1, num_drafts.item(0))
            row = self._history[:, slots.item(0)]
            row *= _FORGET
            row += (in_all, self._finished_expected.item(slots.item(0)), num_tried)
        else:
            tried = np.minimum(num_accepted + 1, num_drafts)
            in_all, num_tried = sum(num_accepted.tolist()), sum(tried.tolist())
            newest = np.array((num_accepted, self._finished_expected[slots], tried), np.float32)
            newest += _FORGET * self._history.take(slots, 1)
            self._history[:, slots] = newest
        kept = max(0.0, 1.0 - num_tried / _MAX_TRIED_BY_ALL)
        self._accepted_by_all = kept * self._accepted_by_all + in_all
        self._tried_by_all = kept * self._tried_by_all + num_tried

    def pass_steps(self, num_steps: int) -> None:
        """Record plain steps of a pause, at most `num_unmeasured`."""
        self.num_unmeasured -= num_steps
        self.account.pass_steps(num_steps)

    def finish_step(self, step: FinishedStep) -> None:
        """Record the duration of a step. Steps with prompt tokens are compared only with each other."""
        # The next step may be planned before this one is observed.
        finished, planned = self._finished_expected, self._step_expected
        self._finished_expected, self._step_expected = planned, finished
        last_pass, self._last_pass = self._last_pass, step.num_tokens if step.is_followed else 0
        if step.num_chunk_tokens or not step.num_rows:
            if step.num_chunk_tokens:
                self._num_followed += step.is_followed
                self._finish_prompts(step, last_pass + self._last_pass)
            self._is_drafting = self._has_proposed_early = False
            self._spent_before += self._spent
            self._spent = 0.0
        else:
            self._finish_decodes(step, last_pass)
        self._num_to_prompt = max(0, self._num_to_prompt - 1)
        pays = self._was_drafting or self._last_pass or self._spent_before or self._owed
        self.num_unmeasured = 0 if pays else max(0, self.account.pause - _NUM_MEASURED - 1)

    def _finish_decodes(self, step: FinishedStep, last_pass: int) -> None:
        """Record a step of decodes. A draft model ran over `last_pass` tokens after the step before it."""
        account, num_drafts = self.account, step.num_tokens - step.num_rows
        has_proposed_early, self._has_proposed_early = self._has_proposed_early, False
        is_last_of_pause = account.pause == 1
        account.earn()
        if self._num_to_skip and not has_proposed_early:
            self._num_to_skip -= 1
        is_called, was_called = self._is_drafting or num_drafts > 0, self._was_drafting
        own = self._spent
        self._is_drafting, self._was_drafting = False, is_called
        cost = self.cost.of(step.num_rows)
        if is_last_of_pause:
            cost.forgive_all()
        seconds = max(0.0, step.seconds - own)
        self._spent_before += own
        self._spent = 0.0
        # A step for which the drafter found nothing is not a plain one: the call took time.
        if is_called:
            seconds = cost.observe(num_drafts, seconds)
        elif step.is_steady and not own and not last_pass and account.pause <= _NUM_MEASURED:
            # Successive plain steps overlap. The first and the last of them take a different time.
            if has_proposed_early:
                cost.observe_early_proposal(seconds)
            else:
                cost.observe_plain(seconds)
                self._since_plain, self._num_plain_wanted = 0, max(0, self._num_plain_wanted - 1)
        if is_called or has_proposed_early:
            self._since_plain += 1
            if self._since_plain >= _PLAIN_INTERVAL:
                self._since_plain, self._num_plain_wanted = 0, _NUM_PLAIN_AGAIN
            if self._since_plain % _RETRY_INTERVAL == 0:
                cost.forgive_old()
        # Without a plain step of about as many rows, use the last one measured: such a step may never come.
        plain = self._plain = cost.plain or self._plain
        if not plain:
            return
        spent, self._spent_before = self._spent_before + self._take_owed(), 0.0
        # No other step was in flight, or the draft model delayed this one.
        is_alone = was_called or last_pass
        if has_proposed_early and not (is_called or is_alone):
            spent += max(0.0, cost.with_early_proposal - plain)
        if is_called or (step.is_steady and not has_proposed_early):
            self._is_waiting = False
        if self._is_waiting:
            self._spent_before, spent = spent, 0.0
        saved = -spent / plain
        if is_called:
            saved += 1 + step.num_accepted / step.num_rows - seconds / plain
        elif is_alone:
            limit = 1 + _MAX_PROMPT_COST if last_pass else MAX_OUTLIER
            saved -= max(0.0, min(seconds / plain, limit) - 1)
        if saved:
            account.record(saved, seconds / plain)

    def _finish_prompts(self, step: FinishedStep, num_followed: int) -> None:
        """Record a step with prompt tokens. Passes of a draft model over `num_followed` tokens may have delayed it.

        The time that they added is charged with the next step, so that its draft tokens can pay it back.
        """
        if self._owed and self._plain:
            self.account.record(-self._take_owed() / self._plain)
        self._owed += self._prompts.observe(
            step.num_tokens,
            step.seconds,
            num_followed=num_followed,
            mean_context=step.mean_context,
        )

    def _take_owed(self) -> float:
        """Return the seconds to charge for a draft model's passes over prompts."""
        owed, self._owed = min(self._owed, _MAX_PROMPT_COST * self._plain), 0.0
        return owed
