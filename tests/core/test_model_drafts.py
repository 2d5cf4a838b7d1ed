"""The number of draft tokens that a model makes, and that the next step verifies."""

from __future__ import annotations

import numpy as np
import pytest
from engine_world import World
from tokenspeed_testing.drafts import FixedDepth
from tokenspeed_testing.requests import request

from tokenspeed_core.api.sampling import FinishReason
from tokenspeed_core.api.step import I32, StepPlan
from tokenspeed_core.scheduler.columns import SlotColumns
from tokenspeed_core.scheduler.drafts import FinishedStep, NextDraftCount
from tokenspeed_core.scheduler.limits import SchedulerLimits
from tokenspeed_core.scheduler.model_drafts import ModelDrafts

LIMITS = SchedulerLimits(4, 64, 10, 10, 8, 100, max_drafts=3)


class Paused(FixedDepth):
    """Wants no draft tokens while `is_paused`."""

    is_paused = False

    def max_drafts(self, num_rows: int) -> int:
        return super().max_drafts(num_rows) * (not self.is_paused)


NONE = np.zeros(0, np.int64)


def slots(*numbers: int) -> I32:
    return np.asarray(numbers, np.int32)


@pytest.fixture
def depth() -> Paused:
    return Paused(3)


@pytest.fixture
def columns() -> SlotColumns:
    columns = SlotColumns(4, 64)
    columns.may_draft[:] = True
    return columns


@pytest.fixture
def drafts(depth: Paused, columns: SlotColumns) -> ModelDrafts:
    return ModelDrafts(depth, LIMITS, columns)


def test_rows_verify_drafts_of_the_previous_step(drafts: ModelDrafts) -> None:
    assert drafts.count(slots(0, 1), slots(9, 9)) is None
    assert drafts.next_drafts(slots(0, 1), NONE) == NextDraftCount(3)
    counts = drafts.count(slots(0, 1, 2), slots(9, 1, 9))
    assert counts is not None
    assert counts.tolist() == [3, 1, 0]
    assert drafts.take(slots(0, 1), counts[:2]) is None


def test_a_step_has_no_more_draft_tokens_than_its_budget(drafts: ModelDrafts) -> None:
    assert drafts.next_drafts(slots(0, 1, 2, 3), NONE) == NextDraftCount(3)
    counts = drafts.count(slots(0, 1, 2, 3), slots(9, 9, 9, 9))
    assert counts is not None
    assert counts.sum() == LIMITS.token_budget - 4


def test_released_slot_has_no_draft_tokens(drafts: ModelDrafts) -> None:
    drafts.next_drafts(slots(2), NONE)
    drafts.end(2)
    assert drafts.count(slots(2), slots(9)) is None


def test_results_are_needed_only_for_made_drafts(drafts: ModelDrafts, columns: SlotColumns) -> None:
    columns.set_decoding(0, True)
    columns.set_decoding(1, True)
    assert not drafts.wants_results()
    assert drafts.next_drafts(slots(0, 1), slots(2), is_useful=False) == NextDraftCount(0)
    assert not drafts.wants_results()
    assert drafts.next_drafts(slots(0, 1), NONE) == NextDraftCount(3)
    assert drafts.wants_results()


def test_rows_with_processors_get_none(drafts: ModelDrafts, columns: SlotColumns) -> None:
    columns.may_draft[1] = False
    assert drafts.next_drafts(slots(1), NONE) is None
    assert drafts.next_drafts(slots(1, 2), NONE) == NextDraftCount(3)
    counts = drafts.count(slots(1, 2), slots(9, 9))
    assert counts is not None
    assert counts.tolist() == [0, 3]


def test_host_gets_the_draft_tokens_of_grammars(drafts: ModelDrafts, columns: SlotColumns) -> None:
    columns.has_grammar[0] = True
    columns.num_grammars = 1
    assert drafts.next_drafts(slots(0, 1), NONE) == NextDraftCount(3, returns_ids=True)
    counts = drafts.count(slots(0, 1), slots(9, 9))
    assert counts is not None
    assert counts.tolist() == [0, 3], "the tokens are still on the device"
    assert drafts.take(slots(0, 1), counts) is None
    drafts.receive(slots(0, 1), np.arange(6, dtype=np.int32).reshape(2, 3))
    counts = drafts.count(slots(0, 1), slots(2, 9))
    assert counts is not None
    assert counts.tolist() == [2, 3]
    ids = drafts.take(slots(0, 1), counts)
    assert ids is not None
    assert ids.tolist() == [0, 1, 3, 4, 5]
    assert drafts.next_drafts(slots(1), NONE) == NextDraftCount(3)
    counts = drafts.count(slots(0, 1), slots(9, 9))
    assert counts is not None
    assert counts.tolist() == [3, 0], "the plan holds the ids of all rows or of none"


def test_paused_model_follows_no_step(drafts: ModelDrafts, depth: Paused) -> None:
    drafts.next_drafts(slots(0), NONE)
    depth.is_paused = True
    assert not drafts.wants_results()
    assert drafts.count(slots(0), slots(9)) is None
    assert not drafts.is_idle, "slot 0 still has draft tokens"
    assert drafts.next_drafts(slots(1), NONE) is None
    assert drafts.is_idle
    assert drafts.next_drafts(slots(1), slots(1)) is None
    depth.is_paused = False
    assert drafts.count(slots(0), slots(9)) is None, "nothing was made meanwhile"


def test_sequences_with_chunks_of_a_pause_get_none(drafts: ModelDrafts, depth: Paused) -> None:
    assert drafts.next_drafts(NONE, slots(0, 1)) == NextDraftCount(0)
    depth.is_paused = True
    assert drafts.next_drafts(slots(2), slots(1, 2)) is None
    depth.is_paused = False
    assert drafts.next_drafts(slots(1), slots(1)) == NextDraftCount(0), "only its last chunk"
    assert drafts.next_drafts(slots(2, 1), NONE) is None
    assert drafts.next_drafts(slots(0, 1, 2), NONE) == NextDraftCount(3)
    counts = drafts.count(slots(0, 1, 2), slots(9, 9, 9))
    assert counts is not None
    assert counts.tolist() == [3, 0, 0]
    drafts.end(1)
    assert drafts.next_drafts(slots(1), slots(1)) == NextDraftCount(3), "another sequence"


class Recorded(FixedDepth):
    """Keeps the finished steps."""

    def __init__(self, max_drafts: int) -> None:
        super().__init__(max_drafts)
        self.steps: list[FinishedStep] = []

    def finish_step(self, step: FinishedStep) -> None:
        self.steps.append(step)


def test_steps_report_the_context_of_their_chunks() -> None:
    world, depth = World(chunk_size=24), Recorded(3)
    scheduler = world.scheduler
    scheduler.use_drafts(ModelDrafts(depth, scheduler.limits, scheduler.columns))
    world.submit(request(0, [10] * 40, max_tokens=2))
    world.run()
    chunks = [(step.num_chunk_tokens, step.mean_context) for step in depth.steps]
    assert chunks == [(24, 0), (16, 24), (0, 0)]


class LongPrompts(Paused):
    """Follows prompts of 20 tokens and more, as in a first pause."""

    def follows_prompts(self, num_tokens: int) -> bool:
        return num_tokens >= 20


def test_all_chunks_of_a_long_prompt_are_followed(columns: SlotColumns) -> None:
    """Also the last one, which is short. Cached tokens do not count."""
    drafts = ModelDrafts(LongPrompts(3), LIMITS, columns)
    columns.target[:3] = 21, 19, 40
    columns.resumed[:3] = 0, 0, 30
    columns.num_planned[0] = 20
    assert drafts.next_drafts(slots(0), slots(0, 1)) == NextDraftCount(3)
    assert drafts.next_drafts(slots(1, 2), slots(1, 2)) is None


@pytest.mark.parametrize(("num_pages", "num_left"), [(18, 12), (36, 6)])
def test_draft_tokens_leave_a_page_for_each_row(num_pages: int, num_left: int) -> None:
    """A prompt fills a page. Twelve draft tokens and the next token need four."""
    world = World(num_pages=num_pages, chunk_size=24, num_drafts=12)
    scheduler = world.scheduler
    scheduler.use_drafts(ModelDrafts(FixedDepth(12), scheduler.limits, scheduler.columns))
    for sequence_id in range(6):
        world.submit(request(sequence_id, [10 + sequence_id] * 4, max_tokens=20))
    builder = scheduler.plan()
    assert builder is not None
    assert builder.num_tokens == 24
    assert scheduler.kv.pool.num_available == num_left


@pytest.mark.parametrize("has_draft_model", [False, True])
def test_only_tokens_that_sequences_keep_count_as_accepted(has_draft_model: bool) -> None:
    """Draft tokens after a stop token may be right too."""
    world = World(num_drafts=4, has_draft_model=has_draft_model, depth=1)
    num_rows = 0

    def count(plan: StepPlan) -> None:
        nonlocal num_rows
        num_rows += plan.num_decodes

    world.engine.runner.check = count  # type: ignore[attr-defined]
    stop = np.asarray([7, 19, 33, 41], np.int32)
    for sequence_id in range(12):
        prompt = [5 + sequence_id, 3, sequence_id]
        world.submit(request(sequence_id, prompt, max_tokens=30, stop_token_ids=stop))
    world.run()
    stats = world.engine.stats()
    assert sum(map(len, world.tokens.values())) == 12 + num_rows + stats.num_saved_steps
    assert stats.num_saved_steps > 10
    assert FinishReason.STOP in world.finish.values()
