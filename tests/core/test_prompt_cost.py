"""A draft model that follows prompts is charged for the time that it adds to their steps."""

from __future__ import annotations

import pytest

from tokenspeed_core.scheduler.draft_depth import FIRST_PAUSE, MAX_LOSS, AdaptiveDepth
from tokenspeed_core.scheduler.drafts import FinishedStep
from tokenspeed_core.scheduler.prompt_cost import PromptCost


def test_added_time_is_the_difference_to_plain_steps() -> None:
    cost = PromptCost()
    for seconds in (90.0, 2.0, 2.0):  # the first one compiles kernels
        assert cost.observe(40, seconds, num_followed=0) == 0.0
    assert cost.observe(41, 80.0, num_followed=41) == 0.0
    for _ in range(3):
        assert cost.observe(41, 3.0, num_followed=41) == pytest.approx(1.0)


def test_faster_steps_with_the_model_add_no_time() -> None:
    cost = PromptCost()
    for num_followed in (0, 40):
        for _ in range(3):
            seconds = 1.0 if num_followed else 2.0
            assert cost.observe(40, seconds, num_followed=num_followed) == 0.0


def compare(cost: PromptCost, num_tokens: int, plain: float, added: float) -> None:
    """Measure plain steps with this many tokens, and steps with the model."""
    for _ in range(2):
        cost.observe(num_tokens, plain, num_followed=0)
    for _ in range(2):
        cost.observe(num_tokens, plain + added, num_followed=num_tokens)


def test_added_time_grows_with_the_followed_tokens() -> None:
    cost = PromptCost()
    compare(cost, 100, plain=1.0, added=0.2)
    compare(cost, 300, plain=2.0, added=0.4)
    cost.observe(200, 90.0, num_followed=200)
    assert cost.observe(200, 90.0, num_followed=200) == pytest.approx(0.3)


def test_long_steps_do_not_inherit_the_share_of_short_ones() -> None:
    cost = PromptCost()
    compare(cost, 16, plain=0.01, added=0.04)
    cost.observe(8192, 1.5, num_followed=8192)
    assert cost.observe(8192, 1.5, num_followed=8192) == pytest.approx(0.04)


def test_delay_by_an_earlier_pass_counts_for_its_tokens() -> None:
    """A short prompt that follows a long one waits for the long pass."""
    cost = PromptCost()
    compare(cost, 16, plain=0.01, added=0.001)
    for _ in range(2):
        cost.observe(16, 0.05, num_followed=16 + 8192)
    assert cost.observe(16, 0.011, num_followed=16) == pytest.approx(0.001, abs=1e-4)


def test_steps_are_compared_at_the_same_context() -> None:
    cost = PromptCost()
    compare(cost, 100, plain=1.0, added=0.03)
    for _ in range(3):
        added = cost.observe(100, 9.0, num_followed=100, mean_context=30_000)
    assert added == pytest.approx(0.03)


def steps(depth: AdaptiveDepth, num_steps: int, **values: float) -> None:
    """Finish decode steps of four rows, which take half a second."""
    for _ in range(num_steps):
        depth.finish_step(FinishedStep(4, 4, 0, 0, **{"seconds": 0.5, **values}))


def prompts(depth: AdaptiveDepth, num_steps: int, seconds: float, *, is_followed: bool) -> None:
    for _ in range(num_steps):
        depth.finish_step(FinishedStep(4, 40, 37, 0, seconds, is_followed=is_followed))


@pytest.fixture
def depth() -> AdaptiveDepth:
    """Return a depth that has measured plain steps, and whose first pause is over."""
    depth = AdaptiveDepth(4, 3)
    prompts(depth, 3, 1.0, is_followed=False)
    assert depth.is_paused
    steps(depth, FIRST_PAUSE + 20)
    assert not depth.is_paused
    return depth


def test_followed_prompts_use_up_the_budget(depth: AdaptiveDepth) -> None:
    prompts(depth, 2, 1.1, is_followed=True)
    assert not depth.is_paused
    prompts(depth, 12, 1.1, is_followed=True)
    assert depth.is_paused
    assert depth.max_drafts(4) == 0


def test_plain_prompts_cost_nothing(depth: AdaptiveDepth) -> None:
    balance = depth.account.balance
    prompts(depth, 50, 9.0, is_followed=False)
    assert depth.account.balance == balance


def test_step_after_a_followed_one_is_charged_and_not_plain(depth: AdaptiveDepth) -> None:
    """The host may collect a step before its draft model has run."""
    balance, num_plain = depth.account.balance, depth.cost.of(4).num_plain
    prompts(depth, 1, 1.0, is_followed=True)
    steps(depth, 1, seconds=0.6)
    assert depth.account.balance == pytest.approx(balance + MAX_LOSS - 0.2)
    assert depth.cost.of(4).num_plain == num_plain
    steps(depth, 1)
    assert depth.cost.of(4).num_plain == num_plain + 1


def test_unpaid_costs_do_not_prevent_measurements() -> None:
    depth = AdaptiveDepth(4, 3)
    for is_followed in (False, True):  # before any plain step was measured
        prompts(depth, 3, 1.0 + is_followed, is_followed=is_followed)
        steps(depth, 1)
    depth.spend(0.1)
    steps(depth, 10_000)
    assert depth.cost.of(4).plain == pytest.approx(0.5)
    assert depth.max_drafts(4) == 3


def test_costs_are_charged_in_steps_of_unmeasured_rows(depth: AdaptiveDepth) -> None:
    balance = depth.account.balance
    depth.spend(0.1)
    depth.finish_step(FinishedStep(1, 1, 0, 0, 0.5))
    assert depth.account.balance == pytest.approx(balance + MAX_LOSS - 0.2)
    for _ in range(4):
        depth.finish_step(FinishedStep(1, 1, 0, 0, 0.4))
    assert depth.max_drafts(1) == 3


def test_one_prompt_costs_at_most_a_few_plain_steps(depth: AdaptiveDepth) -> None:
    prompts(depth, 50, 4.0, is_followed=False)
    prompts(depth, 1, 4.0, is_followed=True)
    balance = depth.account.balance
    prompts(depth, 2, 99.0, is_followed=True)  # the cost of the last one is charged later
    assert depth.account.balance == pytest.approx(balance - 16.0)


def test_costly_prompts_are_followed_one_at_a_time(depth: AdaptiveDepth) -> None:
    prompts(depth, 1, 1.0, is_followed=True)
    prompts(depth, 1, 3.0, is_followed=True)  # the model added four plain steps
    steps(depth, 1000)
    assert not depth.is_paused
    depth.account.balance = 3.0
    assert depth.follows_prompts(40)
    assert not depth.follows_prompts(40), "the first one has not finished"
    prompts(depth, 1, 1.0, is_followed=True)
    assert not depth.follows_prompts(40), "it has not been charged"
    steps(depth, 3)
    depth.account.balance = 5.0
    assert depth.follows_prompts(40)
    assert depth.follows_prompts(40), "the budget is larger than the cost"


def test_long_prompts_are_not_charged_the_share_of_short_ones(depth: AdaptiveDepth) -> None:
    for _ in range(3):
        is_followed = depth.follows_prompts(8192)
        depth.finish_step(FinishedStep(1, 8192, 8192, 0, 75.0, is_followed=is_followed))
        prompts(depth, 1, 1.2, is_followed=is_followed)  # delayed by the pass over the long one
        steps(depth, 1)
    assert depth.account.pause < 300


def test_delayed_steps_are_charged_without_plain_ones_of_their_rows(depth: AdaptiveDepth) -> None:
    balance = depth.account.balance
    prompts(depth, 1, 1.0, is_followed=True)
    depth.finish_step(FinishedStep(1, 1, 0, 0, 0.6))
    assert depth.account.balance == pytest.approx(balance + MAX_LOSS - 0.2)


def test_long_prompts_are_followed_in_the_first_pause() -> None:
    depth = AdaptiveDepth(4, 3)
    assert depth.follows_prompts(512)
    assert not depth.follows_prompts(511)
    steps(depth, FIRST_PAUSE + 20)
    assert depth.follows_prompts(1)
    prompts(depth, 3, 1.0, is_followed=False)
    prompts(depth, 8, 2.0, is_followed=True)
    assert depth.is_paused
    assert not depth.follows_prompts(512), "they cost too much"


def test_few_prompts_are_followed_in_a_first_pause_without_decodes() -> None:
    """As with requests of one output token: only decode steps end the pause."""
    depth, num_followed = AdaptiveDepth(4, 3), 0
    for _ in range(100):
        is_followed = depth.follows_prompts(2000)
        num_followed += is_followed
        prompts(depth, 1, 1.0, is_followed=is_followed)
    assert depth.is_paused
    assert 0 < num_followed <= 16
    steps(depth, FIRST_PAUSE + 20)
    assert depth.follows_prompts(2000)
