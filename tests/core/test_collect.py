"""Collecting a step's result: new tokens of sequences, up to the end of each."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenspeed_testing.requests import request

from tokenspeed_core.api.sampling import FinishReason
from tokenspeed_core.api.step import StepLogprobs, StepResult
from tokenspeed_core.kv_cache.hashing import HashChain
from tokenspeed_core.scheduler.collect import (
    Collected,
    NewTokens,
    StepInFlight,
    collect,
    cut_at_end,
    make_outputs,
    rows_without_slot,
)
from tokenspeed_core.scheduler.columns import SlotColumns
from tokenspeed_core.scheduler.sequence import Sequence
from tokenspeed_core.scheduler.step_plan_builder import StepPlanBuilder

MAX_SEQS, MAX_LEN = 8, 64


@dataclass
class Row:
    """A row of a plan: its sequence, the step's result, and whether the sequence still has its slot."""

    num_prompt: int = 3
    max_tokens: int = 10
    stop_ids: list[int] = field(default_factory=list)
    max_new_tokens: int = 1  # 0: a chunk that does not sample
    tokens: list[int] = field(default_factory=lambda: [7])
    has_slot: bool = True
    num_cached: int = 0

    def expected(self) -> tuple[list[int], FinishReason]:
        """Return the tokens that the user gets and how the sequence ends, token by token."""
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
    max_new_tokens = draw(st.integers(0, 4))
    token = st.one_of(st.integers(0, 6), st.integers(0, 6), st.integers(-1, 6))
    return Row(
        draw(st.integers(1, 5)),
        draw(st.integers(1, 5)),
        draw(st.lists(st.integers(0, 6), max_size=2)),
        max_new_tokens,
        draw(st.lists(token, min_size=1, max_size=max_new_tokens)) if max_new_tokens else [],
        draw(st.booleans()),
        draw(st.integers(0, 4)),
    )


def collected(
    plan_rows: list[Row], logprobs: StepLogprobs | None = None
) -> tuple[SlotColumns, Collected, StepResult]:
    """Collect a step of these rows; row i is in slot i, and its sequence is i + 100."""
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
        # Three more tokens may come from later steps.
        rows.num_bound[slot] = row.num_prompt + row.max_new_tokens + 3
        if not row.has_slot:
            rows.vacate(slot, sequence)
    builder, num = StepPlanBuilder(1, rows, 1), len(plan_rows)
    builder.set_decodes(np.arange(num), np.ones(num, np.int32), np.ones(num, np.int32))
    flight = StepInFlight(
        builder.build(),
        np.arange(num),
        np.arange(100, 100 + num),
        np.asarray([row.max_new_tokens for row in plan_rows], np.int32),
    )
    result = StepResult(
        1,
        np.asarray([len(row.tokens) for row in plan_rows], np.int32),
        np.asarray([token for row in plan_rows for token in row.tokens], np.int32),
        logprobs,
    )
    return rows, collect(rows, flight, result), result


@given(st.lists(any_row(), min_size=1, max_size=MAX_SEQS))
def test_sequence_gets_tokens_up_to_its_end(plan_rows: list[Row]) -> None:
    rows, outcome, result = collected(plan_rows)
    out = make_outputs([outcome.tokens], result)
    alive = [i for i, row in enumerate(plan_rows) if row.has_slot and row.max_new_tokens]
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
def test_rejected_drafts_reduce_the_upper_bound(plan_rows: list[Row]) -> None:
    rows, _, _ = collected(plan_rows)
    for slot, row in enumerate(plan_rows):
        if row.has_slot and row.max_new_tokens:
            assert rows.num_bound[slot] == row.num_prompt + len(row.tokens) + 3


@given(st.lists(any_row(), min_size=1, max_size=MAX_SEQS))
def test_rows_without_slot_are_separate(plan_rows: list[Row]) -> None:
    _, outcome, result = collected(plan_rows)
    found = {row: tokens.tolist() for row, tokens in rows_without_slot(outcome, result)}
    assert found == {
        i: row.tokens for i, row in enumerate(plan_rows) if not row.has_slot and row.tokens
    }


def test_cached_tokens_are_reported_with_the_first_token() -> None:
    rows, outcome, _ = collected(
        [Row(num_cached=8), Row(num_cached=4, max_new_tokens=0, tokens=[]), Row()]
    )
    assert outcome.tokens.num_cached.tolist() == [8, 0]
    assert rows.num_cached[:3].tolist() == [0, 4, 0]


@given(any_row())
def test_stop_and_length_rules_of_one_row(row: Row) -> None:
    tokens = np.asarray(row.tokens, np.int32)
    kept = cut_at_end(
        np.asarray([len(tokens)], np.int32),
        tokens,
        np.asarray([row.max_tokens], np.int32),
        np.asarray([row.stop_ids], np.int32).reshape(1, -1),
    )
    expected, finish = row.expected()
    assert kept.token_ids.tolist() == expected
    assert kept.num_tokens.tolist() == [len(expected)]
    assert kept.finish.tolist() == [finish]


def late(row: int, sequence_id: int, tokens: list[int], finish: FinishReason) -> NewTokens:
    """Return the new tokens of a sequence without a slot."""
    return NewTokens(
        np.asarray([row], np.int32),
        np.asarray([sequence_id], np.int64),
        np.asarray([len(tokens)], np.int32),
        np.asarray(tokens, np.int32),
        np.asarray([finish], np.int32),
        np.asarray([8], np.int32),
    )


def test_late_tokens_follow_the_others() -> None:
    _, outcome, result = collected(
        [Row(tokens=[5]), Row(tokens=[6], has_slot=False), Row(tokens=[-1], has_slot=False)]
    )
    one = late(1, 101, [6], FinishReason.LENGTH)
    other = late(2, 102, [], FinishReason.ERROR)
    out = make_outputs([outcome.tokens, one, other], result)
    assert out.sequence_ids.tolist() == [100, 101, 102]
    assert out.num_tokens.tolist() == [1, 1, 0]
    assert out.token_ids.tolist() == [5, 6]
    assert out.finish.tolist() == [FinishReason.NOT, FinishReason.LENGTH, FinishReason.ERROR]
    assert out.num_cached_tokens.tolist() == [0, 8, 8]


@pytest.mark.parametrize("is_late", [False, True])
def test_logprobs_follow_their_sequences(is_late: bool) -> None:
    asked = np.asarray([1, 2, 4], np.int32)  # rows of the plan
    logprobs = StepLogprobs(
        asked,
        2,
        -asked.astype(np.float32),
        asked,
        np.repeat(asked, 2),
        np.repeat(-asked, 2).astype(np.float32),
    )
    _, outcome, result = collected(
        [Row(has_slot=False), Row(), Row(has_slot=False), Row(max_new_tokens=0, tokens=[]), Row()],
        logprobs,
    )
    parts = [outcome.tokens]
    if is_late:
        parts.append(late(2, 102, [7], FinishReason.NOT))
    out = make_outputs(parts, result)
    selected = out.logprobs
    assert selected is not None
    kept = [1, 2, 4] if is_late else [1, 4]
    assert sorted(out.sequence_ids[selected.rows].tolist()) == [row + 100 for row in kept]
    rows = out.sequence_ids[selected.rows] - 100
    assert selected.width == 2
    assert selected.ranks.tolist() == rows.tolist()
    assert selected.chosen.tolist() == (-rows).tolist()
    assert selected.top_ids.tolist() == np.repeat(rows, 2).tolist()
    assert selected.top_values.tolist() == np.repeat(-rows, 2).tolist()


@given(st.integers(1, 40), st.integers(0, 40), st.booleans())
def test_full_blocks_are_found_when_the_sequence_goes_on(
    num_known: int, num_hashed: int, ends: bool
) -> None:
    rows, outcome, _ = collected([Row(num_prompt=num_known, stop_ids=[7] if ends else [])])
    rows.num_hashed_tokens[0] = num_hashed
    found = outcome.with_full_block(rows, 4).tolist()
    assert found == ([0] if num_known - num_hashed >= 4 and not ends else [])
