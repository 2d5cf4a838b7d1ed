"""A drafter costs nothing while drafts are paused, and little when they are tried again."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest
from engine_world import MODEL, World
from tokenspeed_testing.drafts import FixedDepth
from tokenspeed_testing.requests import request

from tokenspeed_core.api.drafters import Drafts
from tokenspeed_core.api.step import I32, StepResult
from tokenspeed_core.engine import engine as engine_module
from tokenspeed_core.scheduler import drafts as drafts_module
from tokenspeed_core.scheduler.draft_depth import (
    FIRST_PAUSE,
    MAX_LOSS,
    STAKE,
    Account,
    AdaptiveDepth,
)
from tokenspeed_core.scheduler.drafts import FinishedStep

NUM_SEQUENCES = 3


class Paused(FixedDepth):
    """Wants no draft tokens while `is_paused`."""

    is_paused = True
    seconds = float("inf")

    def max_drafts(self, num_rows: int) -> int:
        return super().max_drafts(num_rows) * (not self.is_paused)

    def max_seconds(self, num_rows: int) -> float:
        return self.seconds


class Calls:
    """The calls of a drafter, in order, and the steps in flight at each collection."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        self.extended: list[int] = []
        self.proposed: list[int] = []
        self.in_flight: list[int] = []
        drafter, runner = world.drafter, world.engine.runner
        begin, extend, propose, collect = (
            drafter.begin,
            drafter.extend,
            drafter.propose,
            runner.collect,
        )

        def note_begin(slot: int, token_ids: I32, num_prompt: int, tenant: str) -> None:
            self.names.append("begin")
            begin(slot, token_ids, num_prompt, tenant)

        def note_extend(slots: I32, counts: I32, token_ids: I32) -> None:
            self.names.append("extend")
            self.extended += counts.tolist()
            extend(slots, counts, token_ids)

        def note_propose(slots: I32, max_drafts: I32) -> Drafts:
            self.names.append("propose")
            self.proposed.append(len(slots))
            return propose(slots, max_drafts)

        def note_collect(step_id: int) -> StepResult:
            self.in_flight.append(len(world.scheduler.in_flight))
            return collect(step_id)

        monkeypatch.setattr(drafter, "begin", note_begin)
        monkeypatch.setattr(drafter, "extend", note_extend)
        monkeypatch.setattr(drafter, "propose", note_propose)
        monkeypatch.setattr(runner, "collect", note_collect)


def paused_world(monkeypatch: pytest.MonkeyPatch) -> tuple[World, Paused, Calls]:
    """Return an engine whose sequences decode, with paused drafts."""
    world, depth = World(num_drafts=3), Paused(3)
    assert world.scheduler.drafts is not None
    world.scheduler.drafts._depth = depth
    for i in range(NUM_SEQUENCES):
        prompt = np.random.default_rng(i).integers(0, MODEL.vocab_size, 5).tolist()
        world.submit(request(i, prompt, max_tokens=40))
    while world.scheduler.columns.is_decoding.sum() != NUM_SEQUENCES:
        world.step()
    world.step()  # collects the first tokens
    return world, depth, Calls(world, monkeypatch)


def test_paused_drafter_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    world, _, calls = paused_world(monkeypatch)
    for _ in range(10):
        world.step()
    assert calls.names == []
    assert calls.in_flight == [2] * 10, "two steps are in flight, as without a drafter"


@pytest.mark.parametrize("has_model", [False, True])
def test_prompts_are_passed_without_a_draft_model(
    monkeypatch: pytest.MonkeyPatch, has_model: bool
) -> None:
    world, depth, _ = paused_world(monkeypatch)
    monkeypatch.setattr(world.scheduler.drafts, "has_model", has_model)
    depth.is_paused = False
    passed: list[int] = []
    finished: list[FinishedStep] = []
    monkeypatch.setattr(depth, "num_unmeasured", 1 << 30)
    monkeypatch.setattr(depth, "pass_steps", passed.append)
    monkeypatch.setattr(depth, "finish_step", finished.append)
    before = world.engine.num_steps
    world.run()
    world.submit(request(NUM_SEQUENCES, [1, 2, 3], max_tokens=20))
    world.run()
    world.engine.stats()  # they include the steps that were passed last
    num_prompts = 1 - has_model
    assert sum(passed) + len(finished) == world.engine.num_steps - before - num_prompts
    assert passed
    is_plain = [each.num_tokens == each.num_rows for each in finished]
    assert not any(is_plain[1:]), "the scheduler asks after the first step"
    assert len(finished) > 5
    chunks = [each.num_chunk_tokens for each in finished if each.num_chunk_tokens]
    assert chunks == ([3] if has_model else [])


def test_drafter_gets_the_tokens_of_a_pause_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world, depth, calls = paused_world(monkeypatch)
    depth.is_paused = False
    world.step()
    # The first proposals show that it is worth to collect the steps in flight, whose tokens the second ones follow.
    begun = [*["begin"] * NUM_SEQUENCES, "propose", "extend", "propose"]
    assert calls.names == begun
    depth.is_paused = True
    world.step()
    known = world.scheduler.columns.num_known.copy()
    for _ in range(6):
        world.step()
    assert calls.names == begun
    calls.extended.clear()
    depth.is_paused = False
    world.step()
    assert calls.names[len(begun) :] == ["extend", "propose"] * 2
    assert min(calls.extended[:NUM_SEQUENCES]) >= 6
    assert (world.scheduler.columns.num_known[:NUM_SEQUENCES] > known[:NUM_SEQUENCES]).all()
    world.run()
    for sequence_id, tokens in world.tokens.items():
        prompt = np.asarray(world.requests[sequence_id].prompt).tolist()
        assert tokens == world.model.expected(prompt, len(tokens))


def test_statistics_show_pauses_and_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    world, depth, _ = paused_world(monkeypatch)
    depth.budget = 0.25
    stats = world.engine.stats()
    assert (stats.is_draft_paused, stats.draft_budget, stats.drafts_per_row) == (True, 0.25, 0.0)
    depth.is_paused = False
    for _ in range(4):
        world.step()
    stats = world.engine.stats()
    assert not stats.is_draft_paused
    assert 1 <= stats.drafts_per_row <= 3
    assert stats.num_drafted[0] == stats.num_draft_rows
    assert sum(stats.num_drafted) == stats.num_draft_tokens
    assert world.scheduler.drafts is not None
    world.scheduler.drafts._switch_off()  # type: ignore[attr-defined]
    assert world.engine.stats().is_draft_paused, "the drafter failed"


def test_few_sequences_begin_before_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    world, depth, calls = paused_world(monkeypatch)
    depth.is_paused, depth.seconds = False, 1.5
    clock = iter(range(1000))
    monkeypatch.setattr(drafts_module, "perf_counter", lambda: float(next(clock)))
    world.step()
    assert calls.names[:3] == ["begin", "begin", "propose"], "each takes a second"
    world.step()
    assert calls.names.count("begin") == NUM_SEQUENCES
    assert calls.proposed[0] == 2
    assert calls.proposed[-1] == NUM_SEQUENCES


def test_time_to_begin_includes_the_time_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    world, depth, calls = paused_world(monkeypatch)
    clock = iter(range(1000))
    monkeypatch.setattr(drafts_module, "perf_counter", lambda: float(next(clock)))
    drafts = world.scheduler.drafts
    assert isinstance(drafts, drafts_module.HostDrafts)
    drafts._end_seconds = 3.0
    depth.is_paused, depth.seconds = False, 6.0
    world.step()
    assert calls.names[:3] == ["begin", "begin", "propose"], "a second each, and three to end"
    world.step()
    assert calls.names.count("begin") == 2, "the time does not suffice to end a third one"
    world.run()
    assert drafts._end_seconds < 3.0, "each took a second"


def test_sequence_without_a_known_token_has_no_time_to_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, depth, calls = paused_world(monkeypatch)
    columns, drafts = world.scheduler.columns, world.scheduler.drafts
    assert isinstance(drafts, drafts_module.HostDrafts)
    clock = iter(range(1000))
    monkeypatch.setattr(drafts_module, "perf_counter", lambda: float(next(clock)))
    slot = columns.decoding().item(0)
    world.engine.abort([columns.sequence_id.item(slot)])
    world.submit(request(NUM_SEQUENCES, [1, 2, 3], max_tokens=20))
    while columns.sequence_id[slot] != NUM_SEQUENCES or not columns.is_decoding[slot]:
        world.step()
    assert len(columns.known(slot)) == 3, "its first token is in flight"
    drafts._end_seconds = 3.0
    depth.is_paused, depth.seconds = False, 3.0
    world.step()
    assert calls.names[:2] == ["begin", "propose"], "the next sequence begins instead"


def test_both_proposals_before_a_step_share_the_time_to_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, _, calls = paused_world(monkeypatch)
    depth = AdaptiveDepth(NUM_SEQUENCES, 3)
    for _ in range(FIRST_PAUSE + 20):
        depth.finish_step(FinishedStep(3, 3, 0, 0, 1.0))
    assert depth.max_seconds(NUM_SEQUENCES) == pytest.approx(STAKE + 0.2, abs=0.01)
    assert world.scheduler.drafts is not None
    world.scheduler.drafts._depth = depth
    clock = iter(np.arange(0.0, 300.0, STAKE + 0.3).tolist())
    monkeypatch.setattr(drafts_module, "perf_counter", lambda: next(clock))
    world.step()
    assert calls.names.count("begin") == 1, "it took longer than the limit"


def test_host_time_includes_all_proposals(monkeypatch: pytest.MonkeyPatch) -> None:
    world, depth, calls = paused_world(monkeypatch)
    depth.is_paused = False
    monkeypatch.setattr(engine_module, "perf_counter", lambda: float(calls.names.count("propose")))
    before = world.engine.stats().host.total
    world.step()
    assert calls.names.count("propose") == 2
    world.step()  # collects the step with the second proposals
    assert world.engine.stats().host.total == pytest.approx(before + 2.0, abs=0.5)


def test_account_limits_the_time_to_begin_and_end_sequences() -> None:
    depth = AdaptiveDepth(4, 3)
    for _ in range(FIRST_PAUSE):
        depth.finish_step(FinishedStep(4, 4, 0, 0, 0.5))
    before = depth.max_seconds(4)
    assert before == pytest.approx(0.5 * depth.account.balance)
    assert depth.max_drafts(4) == 3
    depth.spend(2.0)
    depth.finish_step(FinishedStep(4, 4, 0, 0, 2.5))
    assert depth.max_seconds(4) == pytest.approx(before - 2.0 + 0.5 * MAX_LOSS)
    assert depth.max_drafts(4) == 0, "the account has nothing left to lose"
    for _ in range(round(4 / MAX_LOSS)):
        depth.finish_step(FinishedStep(4, 4, 0, 0, 0.5))
    assert depth.max_drafts(4) == 3


def measured_depth(seconds: float = 1.0) -> AdaptiveDepth:
    """Return an `AdaptiveDepth` for one row, after its first pause."""
    depth = AdaptiveDepth(1, 4)
    for _ in range(FIRST_PAUSE):
        depth.finish_step(FinishedStep(1, 1, 0, 0, seconds))
    assert depth.max_drafts(1) == 4
    return depth


SLOT, COUNT = np.zeros(1, np.int64), np.full(1, 4, np.int32)


def test_step_with_drafts_pays_for_the_proposals_before_it() -> None:
    depth = measured_depth()
    depth.cost.of(1).observe_early_proposal(2.0)
    depth.spend(0.25)
    assert depth.are_worth_waiting(SLOT, COUNT, None, 1, 4)
    depth.finish_step(FinishedStep(1, 1, 0, 0, 2.25))
    assert depth.max_drafts(1) == 4, "it is not charged yet"
    depth.finish_step(FinishedStep(1, 1, 0, 0, 1.0, is_steady=False))
    before = depth.budget
    assert depth.choose(SLOT, COUNT, None, 1, 4) == 4
    depth.finish_step(FinishedStep(1, 5, 0, 4, 2.0))
    saved = 1 + 4 - 2.0
    assert depth.budget == pytest.approx(before + MAX_LOSS + saved - (2.0 - 1.0) - 0.25)


def test_plain_steps_pay_if_no_step_with_drafts_follows() -> None:
    depth = measured_depth()
    depth.cost.of(1).observe_early_proposal(1.25)
    assert depth.are_worth_waiting(SLOT, COUNT, None, 1, 4)
    depth.finish_step(FinishedStep(1, 1, 0, 0, 1.25))
    before = depth.budget
    depth.finish_step(FinishedStep(1, 1, 0, 0, 1.0))
    assert depth.budget == pytest.approx(before + MAX_LOSS - 0.25)


def test_unwanted_proposals_become_rare() -> None:
    depth, numbers = measured_depth(), []
    for _ in range(2):
        depth.cost.of(1).observe(4, 100.0)
    for number in range(100):
        if depth.max_drafts(1):
            numbers.append(number)
            assert not depth.are_worth_waiting(SLOT, COUNT, None, 1, 4)
        depth.finish_step(FinishedStep(1, 1, 0, 0, 1.0))
    assert numbers == [0, 2, 6, 14, 30, 46, 62, 78, 94]
    for _ in range(200):
        depth.cost.of(1).observe(4, 1.0)
    while not depth.max_drafts(1):
        depth.finish_step(FinishedStep(1, 1, 0, 0, 1.0))
    assert depth.are_worth_waiting(SLOT, COUNT, None, 1, 4)
    assert depth.max_drafts(1) == 4


def test_passed_steps_of_a_pause_count_like_finished_ones() -> None:
    finishing, passing = AdaptiveDepth(1, 4), AdaptiveDepth(1, 4)
    num_passed = num_waiting = 0
    for number in range(1, 1000):
        step = FinishedStep(1, 1, 0, 0, 1.0)
        if number % 220 == 0:  # a sequence ends
            if num_waiting:
                passing.pass_steps(num_waiting)
                num_passed += num_waiting
                num_waiting = 0
            finishing.spend(2.5)
            passing.spend(2.5)
            step = step._replace(seconds=3.5)
        if number == FIRST_PAUSE + 10:  # draft tokens lose three steps, and delay the next one
            for depth in (finishing, passing):
                assert depth.choose(SLOT, COUNT, None, 1, 4) == 4
            step = FinishedStep(1, 5, 0, 0, 4.0)
        if number == FIRST_PAUSE + 11:
            step = step._replace(seconds=2.0)
        finishing.finish_step(step)
        if passing.num_unmeasured > num_waiting:
            num_waiting += 1
            continue
        if num_waiting:
            passing.pass_steps(num_waiting)
            num_passed += num_waiting
            num_waiting = 0
        passing.finish_step(step)
        assert asdict(passing.account) == pytest.approx(asdict(finishing.account))
        assert passing.max_drafts(1) == finishing.max_drafts(1)
    assert passing.cost.of(1).num_plain == finishing.cost.of(1).num_plain
    assert num_passed > 300


def test_steps_without_drafts_raise_the_budget_to_a_limit() -> None:
    depth = AdaptiveDepth(4, 3)
    for _ in range(10_000):  # drafts are on, but no row may have any, as with logits processors
        depth.finish_step(FinishedStep(4, 4, 0, 0, 0.5))
    assert depth.max_drafts(4) == 3
    assert depth.max_seconds(4) == pytest.approx(4 * 0.5, abs=MAX_LOSS)


def test_costly_steps_may_save_a_larger_budget() -> None:
    account = Account(pause=0)
    for _ in range(10):
        account.record(5.0, cost=3.0)
    assert account.balance == 12.0, "four steps of three plain ones"
    account.record(0.5, cost=1.0)
    assert account.balance == 12.0, "cheap steps keep it, and add nothing"


@pytest.mark.parametrize(("lost", "num_steps"), [(2.0, 200), (3.0, 300), (1000.0, 3400)])
def test_pause_lasts_until_the_budget_is_restored(lost: float, num_steps: int) -> None:
    account = Account(balance=STAKE, pause=0)
    for _ in range(6):  # later pauses are not longer
        account.record(STAKE - account.balance)
        account.record(-lost)
        assert account.pause == num_steps
        for _ in range(num_steps):
            account.earn()
        assert account.pause == 0
        assert account.balance == pytest.approx(STAKE, abs=MAX_LOSS)


def test_loss_during_a_pause_extends_it() -> None:
    account = Account(balance=STAKE, pause=0)
    account.record(-STAKE)
    before = account.pause
    account.record(-0.25)
    assert account.pause == before + 25
