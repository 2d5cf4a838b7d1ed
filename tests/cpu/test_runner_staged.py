"""A plan in the layout of a captured step's buffer, with padding."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenspeed_testing.plans import PlanMaker

from tokenspeed_core.api.step import StepPlan
from tokenspeed_core.worker.slots import SlotLayout
from tokenspeed_core.worker.staged import BucketSize, StagedLayout

STATE = SlotLayout(num_slots=10, num_blocks=8, num_groups=1, max_drafts=4)
PADDED = STATE.padding[1]  # the word of the padding slot's length


def make_plan(decodes: list[int], chunks: dict[int, int]) -> StepPlan:
    """Plan decodes and chunks for sequences named by their slots."""
    maker = PlanMaker(block_size=4)
    for slot in (*decodes, *chunks):
        maker.add(str(slot), [100 * slot + i for i in range(20)], slot)
    return maker.plan(
        [str(slot) for slot in decodes], {str(slot): count for slot, count in chunks.items()}
    )


def fill(layout: StagedLayout, plan: StepPlan) -> dict[str, list[int]]:
    host = np.full(layout.num_int64, -12345, np.int64)
    words, values = np.array([5, 6], np.int64), np.array([50, 60], np.int32)
    layout.fill(host, plan, words, values, STATE)
    narrow = host[layout.middle :].view(np.int32)
    wide = {name: host[place].tolist() for name, place in layout.wide.items()}
    return wide | {name: narrow[place].tolist() for name, place in layout.narrow.items()}


def test_padding_rows_follow_decodes_and_do_not_advance() -> None:
    columns = fill(StagedLayout(BucketSize(4, 0, 0), num_words=3), make_plan([3, 1], {}))
    assert columns == {
        "slots": [3, 1, 9, 9],
        "words": [5, 6, PADDED],
        "values": [50, 60, 0],
        "advance": [1, 1, 0, 0],
    }


def test_chunks_follow_the_padded_decodes() -> None:
    columns = fill(StagedLayout(BucketSize(2, 3, 7), num_words=2), make_plan([4], {0: 2, 6: 3}))
    assert columns["slots"] == [4, 9, 0, 6, 9]
    assert columns["advance"] == [1, 0, 2, 3, 0]
    assert columns["token_slots"] == [4, 9, 0, 0, 6, 6, 6, 9, 9]
    assert columns["positions"] == [0, 0, 0, 1, 0, 1, 2, 0, 0]
    assert columns["ids"] == [0, 0, 0, 1, 600, 601, 602, 0, 0]
    assert columns["chunk_start"] == [0, 2, 5, 5]
    assert columns["last"] == [0, 0, 3, 6, 0]


@pytest.mark.parametrize("decodes", [0, 2])
def test_full_bucket_has_no_padding(decodes: int) -> None:
    plan = make_plan([4, 5][:decodes], {0: 4, 6: 3})
    columns = fill(StagedLayout(BucketSize(decodes, 2, 7), num_words=2), plan)
    assert 9 not in columns["slots"] + columns["token_slots"]
    assert columns["slots"] == plan.slots.tolist()
    assert columns["advance"] == plan.num_query_tokens.tolist()
    assert columns["chunk_start"] == [0, 4, 7]
    assert columns["last"] == [*range(decodes), decodes + 3, decodes + 6]


def with_drafts(slots: list[int], num_drafts: list[int]) -> StepPlan:
    """Plan decodes with draft tokens 1000, 1001, …"""
    total = sum(num_drafts)
    return replace(
        make_plan(slots, {}),
        num_query_tokens=np.array([1 + each for each in num_drafts], np.int32),
        num_draft_tokens=total,
        draft_token_ids=np.arange(1000, 1000 + total, dtype=np.int32),
    )


def test_tokens_of_a_row_with_drafts_follow_each_other() -> None:
    layout = StagedLayout(BucketSize(4, 0, 0, num_draft_tokens=5), num_words=3)
    columns = fill(layout, with_drafts([3, 1, 6], [2, 0, 1]))
    last, drafts = STATE.column("last_token"), STATE.drafts
    assert columns == {
        "slots": [3, 1, 6, 9],
        "words": [5, 6, PADDED],
        "num_drafts": [2, 0, 1, 0],
        "first": [0, 3, 4, 0],
        "token_slots": [3, 3, 3, 1, 6, 6, 9, 9, 9],
        "token_words": [
            *(last + 3, drafts + 12, drafts + 13),
            last + 1,
            *(last + 6, drafts + 24),
            *[last + 9] * 3,
        ],
        "offsets": [0, 1, 2, 0, 0, 1, 0, 0, 0],
        "until_end": [3, 2, 1, 1, 2, 1, 0, 0, 0],
        "values": [50, 60, 0],
        "advance": [3, 1, 2, 0],
        "decode_start": [0, 3, 4, 6, 6],
    }


def test_chunks_follow_the_tokens_of_decodes_with_drafts() -> None:
    plan = make_plan([4, 1], {0: 2, 6: 3})
    plan = replace(
        plan,
        num_query_tokens=np.array([3, 1, 2, 3], np.int32),
        num_draft_tokens=2,
        draft_token_ids=np.array([1000, 1001], np.int32),
    )
    columns = fill(StagedLayout(BucketSize(3, 3, 6, num_draft_tokens=3), num_words=2), plan)
    assert columns["slots"] == [4, 1, 9, 0, 6, 9]
    assert columns["advance"] == [3, 1, 0, 2, 3, 0]
    assert columns["token_slots"] == [4, 4, 4, 1, 9, 9, 0, 0, 6, 6, 6, 9]
    assert columns["positions"][6:] == [0, 1, 0, 1, 2, 0]
    assert columns["ids"][6:] == [0, 1, 600, 601, 602, 0]
    assert columns["chunk_start"] == [0, 2, 5, 5]
    assert columns["decode_start"] == [0, 3, 4, 4]
    assert columns["num_drafts"] == [2, 0, 0, 0, 0, 0]
    assert columns["first"] == [0, 3, 0, 6, 7, 8]
    assert columns["offsets"] == [0, 1, 2, 0, 0, 0, 0, 0, 0]
    assert columns["until_end"] == [3, 2, 1, 1, 0, 0]
    assert columns["last"] == [0, 1, 2, 3, 0, 0, 7, 10, 0]


@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 4)), unique_by=lambda row: row[0]),
    st.integers(0, 3),
    st.integers(0, 5),
)
def test_state_gives_each_draft_token_once(
    rows: list[tuple[int, int]], more_rows: int, more_tokens: int
) -> None:
    """Reads draft tokens from the state through the columns, as `writes` wrote them."""
    plan = with_drafts([slot for slot, _ in rows], [count for _, count in rows])
    size = BucketSize(len(rows) + more_rows, 0, 0, num_draft_tokens=plan.num_draft_tokens + 1)
    size = replace(size, num_draft_tokens=size.num_draft_tokens + more_tokens)
    layout = StagedLayout(size, 2)
    columns = {name: np.array(values) for name, values in fill(layout, plan).items()}
    assert len(columns["token_words"]) == size.num_tokens
    words = np.arange(STATE.num_words)
    for slot in range(STATE.num_slots):
        words[STATE.column("last_token") + slot] = -1 - slot
    places, ids = STATE.writes(replace(plan, slot_inits=None, block_deltas=()))
    assert len(set(places.tolist())) == len(ids) == plan.num_draft_tokens
    words[places] = ids
    found = words[columns["token_words"]].tolist()
    number = 1000
    for row, (slot, count) in enumerate(rows):
        tokens = slice(columns["decode_start"][row], columns["decode_start"][row + 1])
        assert found[tokens] == [-1 - slot, *range(number, number + count)]
        number += count
        positions = 100 + columns["advance"][row] - columns["until_end"][tokens]
        assert positions.tolist() == [*range(100, 101 + count)]
    is_padding = columns["token_slots"] == STATE.padding_slot
    assert is_padding.sum() == size.num_tokens - plan.num_tokens
    assert set(columns["until_end"][is_padding].tolist()) <= {0}  # position 0 of the padding block
    assert set(columns["advance"][len(rows) :].tolist()) <= {0}
    assert columns["decode_start"][len(rows) :].tolist() == [plan.num_tokens] * (more_rows + 1)


def test_device_drafts_do_not_change_the_text() -> None:
    plan = replace(with_drafts([3, 1], [2, 1]), draft_token_ids=None)
    words, values = STATE.writes(replace(plan, slot_inits=None, block_deltas=()))
    assert len(words) == len(values) == 0


def test_more_draft_tokens_than_a_slot_holds_are_refused() -> None:
    STATE.writes(with_drafts([3, 1], [0, 4]))
    with pytest.raises(ValueError, match="5 draft tokens"):
        STATE.writes(with_drafts([3, 1], [0, 5]))


def test_padding_fills_all_columns() -> None:
    draft_sizes = [BucketSize(2, 0, 0, num_draft_tokens=3), BucketSize(2, 1, 4, num_draft_tokens=3)]
    for size in (BucketSize(2, 0, 0), BucketSize(1, 2, 5), *draft_sizes):
        layout = StagedLayout(size, num_words=3)
        host = layout.padding(STATE)
        narrow = host[layout.middle :].view(np.int32)
        assert set(host[layout.wide["slots"]].tolist()) == {STATE.padding_slot}
        assert set(host[layout.wide["words"]].tolist()) == {PADDED}
        assert not narrow.any()
