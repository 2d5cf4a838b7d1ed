"""What a step's result becomes: tokens for those who still wait for them, cut where each sequence ends."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from null_world import request

from tokenspeed_core.api.sampling import FinishReason
from tokenspeed_core.api.step import StepLogprobs, StepResult
from tokenspeed_core.kv_cache.hashing import HashChain
from tokenspeed_core.scheduler.collect import Collected, collect
from tokenspeed_core.scheduler.columns import SlotColumns
from tokenspeed_core.scheduler.sequence import Sequence
from tokenspeed_core.scheduler.step_plan_builder import InFlight, StepPlanBuilder

MAX_SEQS, MAX_LEN = 8, 64


@dataclass
class Row:
    """A row of a plan: what its sequence has, what the step brought, and whether it still holds its slot."""

    num_prompt: int = 3
    max_tokens: int = 10
    stop_ids: list[int] = field(default_factory=list)
    num_new: int = (
        1  # the most tokens that the step might have brought; 0: a chunk that samples nothing
    )
    tokens: list[int] = field(default_factory=lambda: [7])
    holds: bool = True
    num_cached: int = 0

    def expected(self) -> tuple[list[int], FinishReason]:
        """Return the tokens that the user gets and how the sequence ends, one token after another."""
        got: list[int] = []
        for token in self.tokens:
            if token < 0:
                return got, FinishReason.ERROR
            got.append(token)
            if token in self.stop_ids:
                return got, FinishReason.STOP
            if len(got) == self.max_tokens:
                return got, FinishReason.LENGTH
        return got, FinishReason.NOT


@st.composite
def any_row(draw: st.DrawFn) -> Row:
    num_new = draw(st.integers(0, 4))
    token = st.one_of(st.integers(0, 6), st.integers(0, 6), st.integers(-1, 6))
    return Row(
        draw(st.integers(1, 5)),
        draw(st.integers(1, 5)),
        draw(st.lists(st.integers(0, 6), max_size=2)),
        num_new,
        draw(st.lists(token, min_size=1, max_size=num_new)) if num_new else [],
        draw(st.booleans()),
        draw(st.integers(0, 4)),
    )


def collected(
    plan_rows: list[Row], logprobs: StepLogprobs | None = None
) -> tuple[SlotColumns, Collected]:
    """Collect a step of these rows; row i stands in slot i and its sequence is i + 100."""
    rows = SlotColumns(MAX_SEQS, MAX_LEN)
    for slot, row in enumerate(plan_rows):
        submit = request(
            slot + 100,
            list(range(row.num_prompt)),
            max_tokens=row.max_tokens,
            stop_token_ids=np.asarray(row.stop_ids, np.int32),
        )
        sequence = Sequence(slot + 100, submit, 0, slot, HashChain(4, "", 0), submit.prompt)
        rows.occupy(slot, sequence, row.num_cached, MAX_LEN)
        rows.num_bound[slot] = (
            row.num_prompt + row.num_new + 3
        )  # three more from steps launched since
        if not row.holds:
            rows.vacate(slot, sequence)
    draft, num = StepPlanBuilder(1, rows, 1), len(plan_rows)
    draft.decodes(np.arange(num, dtype=np.int32), np.ones(num, np.int32), np.ones(num, np.int32))
    plan = draft.freeze([([], [])], None)
    flight = InFlight(
        plan, np.arange(100, 100 + num), np.asarray([row.num_new for row in plan_rows], np.int32)
    )
    result = StepResult(
        1,
        np.asarray([len(row.tokens) for row in plan_rows], np.int32),
        np.asarray([token for row in plan_rows for token in row.tokens], np.int32),
        logprobs,
    )
    return rows, collect(rows, flight, result)


@given(st.lists(any_row(), min_size=1, max_size=MAX_SEQS))
def test_a_sequence_gets_its_tokens_up_to_its_end_and_no_more(plan_rows: list[Row]) -> None:
    rows, outcome = collected(plan_rows)
    out = outcome.outputs()
    alive = [i for i, row in enumerate(plan_rows) if row.holds and row.num_new]
    expected = [plan_rows[i].expected() for i in alive]
    assert out.sequence_ids.tolist() == [i + 100 for i in alive]
    assert out.num_tokens.tolist() == [len(tokens) for tokens, _ in expected]
    assert out.token_ids.tolist() == [token for tokens, _ in expected for token in tokens]
    assert out.finish.tolist() == [finish for _, finish in expected]
    assert dict(outcome.ended()) == {
        i: finish for i, (_, finish) in zip(alive, expected, strict=True) if finish
    }
    for i, (tokens, _) in zip(alive, expected, strict=True):
        assert rows.known(i).tolist() == [*range(plan_rows[i].num_prompt), *tokens]


@given(st.lists(any_row(), min_size=1, max_size=MAX_SEQS))
def test_what_drafts_did_not_bring_comes_off_the_upper_bound(plan_rows: list[Row]) -> None:
    rows, _ = collected(plan_rows)
    for slot, row in enumerate(plan_rows):
        if row.holds and row.num_new:
            assert rows.num_bound[slot] == row.num_prompt + len(row.tokens) + 3


@given(st.lists(any_row(), min_size=1, max_size=MAX_SEQS))
def test_tokens_of_those_who_lost_their_slot_are_set_apart(plan_rows: list[Row]) -> None:
    _, outcome = collected(plan_rows)
    found = {row: tokens.tolist() for row, tokens in outcome.homeless()}
    assert found == {
        i: row.tokens for i, row in enumerate(plan_rows) if not row.holds and row.tokens
    }


def test_cached_tokens_are_told_once_with_the_first_token() -> None:
    rows, outcome = collected([Row(num_cached=8), Row(num_cached=4, num_new=0, tokens=[]), Row()])
    assert outcome.outputs().num_cached_tokens.tolist() == [8, 0]
    assert rows.num_cached[:3].tolist() == [0, 4, 0]


def test_a_late_token_joins_the_others_and_a_late_failure_is_an_end_without_one() -> None:
    _, outcome = collected(
        [Row(tokens=[5]), Row(tokens=[6], holds=False), Row(tokens=[-1], holds=False)]
    )
    outcome.add_late(1, 101, 6, FinishReason.LENGTH, 8)
    outcome.add_late(2, 102, -1, FinishReason.ERROR, 0)
    out = outcome.outputs()
    assert out.sequence_ids.tolist() == [100, 101, 102]
    assert out.num_tokens.tolist() == [1, 1, 0]
    assert out.token_ids.tolist() == [5, 6]
    assert out.finish.tolist() == [FinishReason.NOT, FinishReason.LENGTH, FinishReason.ERROR]
    assert out.num_cached_tokens.tolist() == [0, 8, 0]


@pytest.mark.parametrize("is_late", [False, True])
def test_log_probabilities_follow_their_sequences(is_late: bool) -> None:
    asked = np.asarray([1, 2, 4], np.int32)  # rows of the plan
    logprobs = StepLogprobs(
        asked,
        2,
        -asked.astype(np.float32),
        asked,
        np.repeat(asked, 2),
        np.repeat(-asked, 2).astype(np.float32),
    )
    _, outcome = collected(
        [Row(holds=False), Row(), Row(holds=False), Row(num_new=0, tokens=[]), Row()],
        logprobs,
    )
    if is_late:
        outcome.add_late(2, 102, 7, FinishReason.NOT, 0)
    out = outcome.outputs()
    told = out.logprobs
    assert told is not None
    kept = [1, 2, 4] if is_late else [1, 4]
    assert sorted(out.sequence_ids[told.rows].tolist()) == [row + 100 for row in kept]
    rows = out.sequence_ids[told.rows] - 100
    assert told.width == 2
    assert told.ranks.tolist() == rows.tolist()
    assert told.chosen.tolist() == (-rows).tolist()
    assert told.top_ids.tolist() == np.repeat(rows, 2).tolist()
    assert told.top_values.tolist() == np.repeat(-rows, 2).tolist()


@given(st.integers(1, 40), st.integers(0, 40), st.booleans())
def test_a_sequence_that_has_filled_a_block_is_due_for_naming(
    num_known: int, num_named: int, ends: bool
) -> None:
    rows, outcome = collected([Row(num_prompt=num_known, stop_ids=[7] if ends else [])])
    rows.num_hashed_tokens[0] = num_named
    due = outcome.due_for_naming(rows, 4).tolist()
    assert due == ([0] if num_known - num_named >= 4 and not ends else [])
