"""The number of draft tokens follows acceptance and measured step times, and never costs much."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed_core.scheduler.draft_depth import (
    FIRST_PAUSE,
    MARGIN,
    STAKE,
    AdaptiveDepth,
    choose_count,
    choose_counts,
)
from tokenspeed_core.scheduler.drafts import FinishedStep
from tokenspeed_core.scheduler.step_cost import StepCost, size_class


def test_size_classes_ascend_with_numbers() -> None:
    classes = [size_class(number) for number in range(1000)]
    assert classes == sorted(classes)
    assert len(set(classes)) == classes[-1] + 1


@settings(max_examples=150)
@given(data=st.data(), num_rows=st.integers(1, 3), width=st.integers(1, 3))
def test_chosen_counts_are_the_fastest(data: st.DataObject, num_rows: int, width: int) -> None:
    chances = st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0])
    cells = data.draw(st.lists(chances, min_size=num_rows * width, max_size=num_rows * width))
    extra = data.draw(
        st.lists(st.floats(0, 1), min_size=num_rows * width, max_size=num_rows * width)
    )
    probabilities = np.asarray(cells, np.float32).reshape(num_rows, width)
    seconds = np.cumsum([1.0, *extra]).astype(np.float32)
    counts, expected = choose_counts(probabilities, num_rows, seconds)

    all_right = np.cumprod(probabilities, axis=1)

    def rate(counts: tuple[int, ...]) -> float:
        tokens = num_rows + sum(all_right[row, :n].sum() for row, n in enumerate(counts))
        return float(tokens / seconds[sum(counts)])

    best = max(rate(each) for each in product(range(width + 1), repeat=num_rows))
    plain = rate((0,) * num_rows)
    chosen = rate(tuple(counts.tolist()))
    assert chosen == pytest.approx(best if best > MARGIN * plain else plain, rel=0.02)
    gain = float(expected.sum())
    assert (num_rows + gain) / seconds[counts.sum()] == pytest.approx(chosen, rel=1e-3)


@settings(max_examples=150)
@given(
    probabilities=st.lists(st.floats(0, 0.99), min_size=1, max_size=6),
    extra=st.lists(st.floats(0, 1), min_size=6, max_size=6),
)
def test_one_row_gets_the_count_of_the_batched_choice(
    probabilities: list[float], extra: list[float]
) -> None:
    seconds = np.cumsum([1.0, *extra]).astype(np.float32)
    count, gain = choose_count(probabilities, seconds.tolist())
    counts, gains = choose_counts(np.asarray([probabilities], np.float32), 1, seconds.tolist())
    rates = [
        (1 + each) / seconds[number] for number, each in ((count, gain), (counts[0], gains[0]))
    ]
    assert rates[0] == pytest.approx(rates[1], rel=0.021 if 0 in (count, counts[0]) else 1e-5)


@pytest.mark.parametrize("claimed", [None, 0.3, 0.7, 0.95])
def test_one_row_gets_the_batched_estimates(claimed: float | None) -> None:
    depth, slots, most = AdaptiveDepth(2, 8), np.arange(2, dtype=np.int32), np.full(2, 8, np.int32)
    for accepted in (4, 0, 2, 4, 3, 0, 0):
        claims = None if claimed is None else np.full(16, claimed, np.float32)
        rows = depth._estimates(slots, most, claims)
        half = None if claims is None else claims[:8]
        row = depth._estimates_of_row(depth._history[:, 1].tolist(), 8, half)
        assert rows[1].tolist() == pytest.approx(row, rel=1e-5)
        depth._finished_expected[:] = 1.5
        depth.observe(slots, most // 2, np.asarray([4, accepted], np.int32))


def test_rows_are_observed_alone_as_together() -> None:
    together, alone = AdaptiveDepth(2, 8), AdaptiveDepth(2, 8)
    for number in range(3):
        drafts, accepted = np.asarray([8, 2], np.int32), np.asarray([number, 2], np.int32)
        for depth in (together, alone):
            depth._finished_expected[:] = (1.5, 0.25)
        together.observe(np.arange(2), drafts, accepted)
        for slot in range(2):
            alone.observe(np.asarray([slot]), drafts[slot : slot + 1], accepted[slot : slot + 1])
    assert together._history.ravel() == pytest.approx(alone._history.ravel())
    assert together._prior() == pytest.approx(alone._prior(), abs=0.01)


@pytest.mark.parametrize("num_rows", [1, 2])
def test_step_is_observed_after_the_next_is_planned(num_rows: int) -> None:
    early, late = AdaptiveDepth(2, 8), AdaptiveDepth(2, 8)
    slots, most = np.arange(num_rows), np.full(num_rows, 8, np.int32)
    for depth in (early, late):
        for _ in range(FIRST_PAUSE):
            depth.finish_step(FinishedStep(num_rows, num_rows, 0, 0, 1.0))
        drafts = depth.choose(slots, most, np.full(8 * num_rows, 0.9, np.float32), num_rows, 100)
        assert drafts.all()
        depth.finish_step(FinishedStep(num_rows, num_rows + int(drafts.sum()), 0, 0, 1.0))
        if depth is early:
            depth.observe(slots, drafts, drafts)
        # The tokens of the next step are less probable.
        next_drafts = depth.choose(
            slots, most, np.full(8 * num_rows, 0.5, np.float32), num_rows, 100
        )
        assert next_drafts.all()
        if depth is late:
            depth.observe(slots, drafts, drafts)
    assert late._history.ravel() == pytest.approx(early._history.ravel())


def test_times_of_unmeasured_draft_counts_are_interpolated() -> None:
    cost = StepCost(1, 8).of(1)
    cost.observe_plain(1.0)
    cost.observe(4, 30.0)
    assert cost.with_drafts(4) == [1.0] * 5, "the first step of a kind does not count"
    cost.observe(4, 3.0)
    assert cost.with_drafts(8) == [1.0, 1.5, 2.0, 2.5, 3.0, 3.0, 3.0, 3.0, 3.0]
    for _ in range(2):
        cost.observe(0, 2.0)  # the drafter was called and found nothing
    assert cost.with_drafts(4) == [2.0, 2.25, 2.5, 2.75, 3.0]


def test_slow_steps_among_the_first_do_not_count() -> None:
    cost = StepCost(1, 8).of(1)
    cost.observe_plain(1.0)
    for seconds in (30.0, 3.0, 20.0, 4.0):
        cost.observe(4, seconds)
    assert cost.with_drafts(4)[4] == 3.0


def test_single_slow_step_hardly_changes_the_mean() -> None:
    cost = StepCost(1, 8).of(1)
    for _ in range(20):
        cost.observe_plain(1.0)
        cost.observe(4, 3.0)
    cost.observe_plain(7.0)
    assert cost.observe(4, 21.0) == 21.0, "the charge is not limited to the next mean"
    assert cost.plain == pytest.approx(1.1)
    assert cost.with_drafts(4)[4] == pytest.approx(3.3)


def test_drafts_that_were_slow_are_tried_again_after_pauses() -> None:
    depth, slots, counts = AdaptiveDepth(1, 4), np.zeros(1, np.int64), np.full(1, 4, np.int32)
    for _ in range(20):
        depth.cost.of(1).observe(4, 20.0)
    num_rejected = 0
    for _ in range(3000):
        seconds = 1.0
        if depth.max_drafts(1):
            if depth.are_worth_waiting(slots, counts, None, 1, 4):
                break
            num_rejected += 1
            depth.spend(STAKE + 0.1)  # more than the budget
            seconds += STAKE + 0.1
        depth.finish_step(FinishedStep(1, 1, 0, 0, seconds))
    assert 5 < num_rejected < 20
    assert depth.cost.of(1).with_drafts(4)[4] < 3.5


def test_time_of_zero_does_not_stay() -> None:
    cost = StepCost(1, 8).of(1)
    cost.observe_plain(1.0)
    cost.observe(4, 0.0)
    assert cost.with_drafts(4) == [1.0] * 5, "more tokens never count as faster"
    for _ in range(3):
        cost.observe(4, 3.0)
    assert cost.with_drafts(4)[4] == pytest.approx(3.0)


class Simulation:
    """Decodes rows with draft tokens that are right with a given probability, at a given cost of a step."""

    def __init__(
        self,
        num_rows: int,
        acceptance: float,
        base: float,
        per_token: float,
        *,
        seed: int,
        claimed: float | None,
        overhead: float = 0.0,
        noise: float = 0.0,
        alone: float = 0.0,
        max_drafts: int = 8,
    ) -> None:
        self.depth = AdaptiveDepth(num_rows, max_drafts)
        self.random = np.random.default_rng(seed)
        self.slots = np.arange(num_rows, dtype=np.int32)
        self.acceptance, self.claimed, self.max_drafts = acceptance, claimed, max_drafts
        self.base, self.per_token = base, per_token
        self.overhead, self.noise = overhead, noise
        # What a step takes longer if the step before is collected first. Plain steps follow each other without it.
        self.alone, self.was_drafting = alone, False
        self.tokens, self.seconds, self.num_drafts = 0, 0.0, 0

    def step(self) -> None:
        rows, depth = len(self.slots), self.depth
        counts = np.full(rows, depth.max_drafts(rows), np.int32)
        is_drafting = bool(counts.any())
        if is_drafting:
            claims = None
            if self.claimed is not None:
                claims = np.full(int(counts.sum()), self.claimed, np.float32)
            counts = depth.choose(self.slots, counts, claims, rows, 10**6)
        right = self.random.random((rows, self.max_drafts)) < self.acceptance
        accepted = np.minimum(counts, np.argmin(np.c_[right, np.zeros(rows, bool)], axis=1))
        num_tokens = rows + int(counts.sum())
        is_alone = is_drafting or self.was_drafting
        self.was_drafting = is_drafting
        exact = self.base + self.per_token * num_tokens + self.overhead * is_drafting
        exact += self.alone * is_alone
        seconds = exact * (1 + self.noise * self.random.standard_normal())
        seconds = max(0.1 * exact, seconds)
        num_accepted = int(accepted.sum())
        depth.finish_step(FinishedStep(rows, num_tokens, 0, num_accepted, seconds, not is_alone))
        depth.observe(self.slots, counts, accepted.astype(np.int32))
        self.tokens += rows + num_accepted
        self.seconds += exact
        self.num_drafts += int(counts.sum())

    def speedup(self, num_steps: int) -> float:
        """Return the rate of tokens relative to steps without drafts."""
        for _ in range(num_steps):
            self.step()
        rows = len(self.slots)
        return self.tokens / self.seconds * (self.base + self.per_token * rows) / rows


@settings(max_examples=12, deadline=None)
@given(
    num_rows=st.sampled_from([1, 3, 8]),
    acceptance=st.sampled_from([0.0, 0.2, 0.5, 0.8, 0.95]),
    per_token=st.sampled_from([0.0, 0.01, 0.1, 1.0]),
    overhead=st.sampled_from([0.0, 0.05, 0.5]),
    noise=st.sampled_from([0.0, 0.05]),
    alone=st.sampled_from([0.0, 0.8]),
    claimed=st.sampled_from([None, 0.3, 0.9]),
    seed=st.integers(0, 1000),
)
def test_speculation_is_hardly_ever_slower(
    num_rows: int,
    acceptance: float,
    per_token: float,
    overhead: float,
    noise: float,
    alone: float,
    claimed: float | None,
    seed: int,
) -> None:
    simulation = Simulation(
        num_rows,
        acceptance,
        1.0,
        per_token,
        seed=seed,
        claimed=claimed,
        overhead=overhead,
        noise=noise,
        alone=alone,
    )
    assert simulation.speedup(500) >= 0.98


@pytest.mark.parametrize(
    ("num_rows", "acceptance", "per_token", "expected"),
    [(1, 0.95, 0.01, 5.0), (1, 0.7, 0.05, 2.0), (8, 0.9, 0.02, 2.2)],
)
def test_cheap_drafts_are_used(
    num_rows: int, acceptance: float, per_token: float, expected: float
) -> None:
    simulation = Simulation(num_rows, acceptance, 1.0, per_token, seed=0, claimed=None)
    assert simulation.speedup(1000) >= expected


def test_rejecting_rows_get_fewer_drafts() -> None:
    depth, slots = AdaptiveDepth(2, 8), np.arange(2, dtype=np.int32)
    for _ in range(FIRST_PAUSE):
        depth.finish_step(FinishedStep(2, 2, 0, 0, 1.0))
    assert depth.max_drafts(2) == 8
    for _ in range(10):
        counts = depth.choose(slots, np.full(2, 8, np.int32), None, 2, 100)
        first, num_drafts = int(counts[0]), int(counts.sum())
        depth.finish_step(FinishedStep(2, 2 + num_drafts, 0, first, 1.0 + 0.1 * num_drafts))
        depth.observe(slots, counts, np.asarray([first, 0], np.int32))
    counts = depth.choose(slots, np.full(2, 8, np.int32), None, 2, 100)
    assert counts[0] > counts[1]


@pytest.mark.parametrize("num_rows", [1, 2])
def test_rejecting_row_is_tried_again(num_rows: int) -> None:
    depth, slots = AdaptiveDepth(2, 8), np.arange(num_rows, dtype=np.int32)
    for _ in range(FIRST_PAUSE):
        depth.finish_step(FinishedStep(num_rows, num_rows, 0, 0, 1.0))
    most, claims = np.full(num_rows, 8, np.int32), np.full(8 * num_rows, 0.95, np.float32)
    for _ in range(4):
        depth.cost.of(num_rows).observe(8 * num_rows, 6.0)
    depth.choose(slots, most, claims, num_rows, 100)
    depth.finish_step(FinishedStep(num_rows, 9 * num_rows, 0, 0, 6.0))
    depth.observe(slots, most, np.zeros(num_rows, np.int32))
    chosen = [depth.choose(slots, most, claims, num_rows, 100).sum() for _ in range(200)]
    assert chosen[0] == 0
    assert max(chosen) > 0


def test_new_sequence_does_not_inherit_slot_history() -> None:
    depth, slots = AdaptiveDepth(1, 4), np.zeros(1, np.int32)
    for _ in range(FIRST_PAUSE):
        depth.finish_step(FinishedStep(1, 1, 0, 0, 1.0))
    fresh = depth.choose(slots, np.full(1, 4, np.int32), None, 1, 100)
    for _ in range(50):
        depth.observe(slots, np.full(1, 4, np.int32), np.zeros(1, np.int32))
    depth.begin(0)
    assert depth.choose(slots, np.full(1, 4, np.int32), None, 1, 100) == fresh


def test_short_sequences_use_the_acceptance_of_earlier_ones() -> None:
    simulation = Simulation(1, 0.95, 1.0, 0.2, seed=1, claimed=None, overhead=0.2)
    simulation.speedup(FIRST_PAUSE)
    for _ in range(60):
        simulation.speedup(3)
        simulation.depth.begin(0)
    tokens, drafts = simulation.tokens, simulation.num_drafts
    simulation.speedup(1)
    assert simulation.num_drafts - drafts == 8, "the first step of a sequence has all drafts"
    assert (tokens - FIRST_PAUSE) / 180 > 5
