"""A plan in the layout of a captured step's buffer, with padding."""

from __future__ import annotations

import numpy as np
import pytest
from tokenspeed_testing.plans import PlanMaker

from tokenspeed_core.api.step import StepPlan
from tokenspeed_core.worker.staged import BucketSize, StagedLayout

PADDING = (9, 77)


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
    layout.fill(host, plan, words, values, PADDING)
    narrow = host[layout.middle :].view(np.int32)
    wide = {name: host[place].tolist() for name, place in layout.wide.items()}
    return wide | {name: narrow[place].tolist() for name, place in layout.narrow.items()}


def test_padding_rows_follow_decodes_and_do_not_advance() -> None:
    columns = fill(StagedLayout(BucketSize(4, 0, 0), num_words=3), make_plan([3, 1], {}))
    assert columns == {
        "slots": [3, 1, 9, 9],
        "words": [5, 6, 77],
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
    assert columns["query_start"] == [0, 2, 5, 5]
    assert columns["last"] == [0, 0, 3, 6, 0]


@pytest.mark.parametrize("decodes", [0, 2])
def test_full_bucket_has_no_padding(decodes: int) -> None:
    plan = make_plan([4, 5][:decodes], {0: 4, 6: 3})
    columns = fill(StagedLayout(BucketSize(decodes, 2, 7), num_words=2), plan)
    assert 9 not in columns["slots"] + columns["token_slots"]
    assert columns["slots"] == plan.slots.tolist()
    assert columns["advance"] == plan.num_query_tokens.tolist()
    assert columns["query_start"] == [0, 4, 7]
    assert columns["last"] == [*range(decodes), decodes + 3, decodes + 6]
