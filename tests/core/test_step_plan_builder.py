"""Step plans: the order of rows, block table changes and the state of new sequences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tokenspeed_testing.requests import request

from tokenspeed_core.api.step import I32
from tokenspeed_core.kv_cache.hashing import HashChain
from tokenspeed_core.kv_cache.lease import ABSENT, BlockLease
from tokenspeed_core.kv_cache.match import TableEntries
from tokenspeed_core.scheduler.columns import SlotColumns
from tokenspeed_core.scheduler.limits import SchedulerLimits
from tokenspeed_core.scheduler.sequence import Sequence
from tokenspeed_core.scheduler.step_plan_builder import StepPlanBuilder


def ints(*values: int) -> I32:
    return np.asarray(values, np.int32)


def sequence(
    sequence_id: int, prompt: list[int], output: list[int], seed: int = 0, **changes: Any
) -> Sequence:
    submit = request(sequence_id, prompt, **changes)
    return Sequence(
        sequence_id, submit, seed, sequence_id, HashChain(4, "", 0), ints(*prompt, *output)
    )


def new_builder(rows: SlotColumns | None = None, num_groups: int = 2) -> StepPlanBuilder:
    return StepPlanBuilder(3, rows or SlotColumns(6, 64), num_groups)


def test_decodes_come_before_chunks() -> None:
    rows = SlotColumns(6, 64)
    rows.tokens[4, :12] = np.arange(12)
    rows.tokens[2, :5] = np.arange(50, 55)
    builder = new_builder(rows)
    builder.add_chunk(4, 3, 8, is_last=False)
    builder.add_chunk(2, 0, 5, is_last=True)
    builder.set_decodes(ints(5, 1), ints(1, 3), ints(20, 30))
    plan = builder.build()
    assert plan.num_decodes == 2
    assert plan.slots.tolist() == [5, 1, 4, 2]
    assert plan.num_query_tokens.tolist() == [1, 3, 5, 5]
    assert plan.num_computed_tokens.tolist() == [20, 30, 3, 0]
    assert plan.wants_logits.tolist() == [True, True, False, True]
    assert plan.token_ids.tolist() == [3, 4, 5, 6, 7, 50, 51, 52, 53, 54]
    assert builder.max_new_tokens().tolist() == [1, 3, 0, 1]
    assert builder.num_tokens == plan.num_tokens == 14


def test_builder_is_empty_until_something_is_added() -> None:
    assert new_builder().is_empty
    occupied = new_builder()
    occupied.add_sequence(0, sequence(0, [1], []), BlockLease([[], []]))
    assert not occupied.is_empty
    grown = new_builder()
    grown.add_table_entries(0, (TableEntries(0, (9,)), TableEntries(0, ())))
    assert not grown.is_empty
    assert new_builder().build().num_rows == 0


def test_block_deltas_list_hits_and_new_entries() -> None:
    builder = new_builder()
    builder.add_sequence(3, sequence(0, [1], []), BlockLease([[10, 11], [ABSENT, 12]]))
    builder.add_table_entries(3, (TableEntries(2, (13,)), TableEntries(2, ())))
    builder.add_table_entries(5, (TableEntries(0, (14,)), TableEntries(0, (15,))))
    first, second = builder.build().block_deltas
    assert [first.slots.tolist(), first.indices.tolist(), first.blocks.tolist()] == [
        [3, 3, 3, 5],
        [0, 1, 2, 0],
        [10, 11, 13, 14],
    ]
    assert [second.slots.tolist(), second.indices.tolist(), second.blocks.tolist()] == [
        [3, 5],
        [1, 0],
        [12, 15],
    ]


def test_slot_inits_are_ragged() -> None:
    builder = new_builder()
    biased = sequence(
        0, [1, 2], [], bias_ids=ints(4, 5), bias_values=np.asarray([1.5, -2], np.float32), top_k=7
    )
    penalized = sequence(1, [1, 2, 3], [8, 9], presence_penalty=0.5, temperature=0.25, logprobs=3)
    for slot, each in ((4, biased), (2, penalized), (0, sequence(2, [1], []))):
        builder.add_sequence(slot, each, BlockLease([[], []]))
    inits = builder.build().slot_inits
    assert inits is not None
    assert inits.slots.tolist() == [4, 2, 0]
    assert inits.top_k.tolist() == [7, 0, 0]
    assert inits.temperature.tolist() == [0.0, 0.25, 0.0]
    assert inits.logprobs.tolist() == [-1, 3, -1]
    assert inits.bias_starts.tolist() == [0, 2, 2, 2]
    assert inits.bias_ids.tolist() == [4, 5]
    assert inits.bias_values.tolist() == [1.5, -2.0]
    assert inits.history_starts.tolist() == [0, 0, 5, 5]
    assert inits.history_ids.tolist() == [1, 2, 3, 8, 9]  # only with penalties
    assert inits.history_num_prompt.tolist() == [0, 3, 0]


def test_slot_inits_count_the_tokens_before_an_end() -> None:
    builder = new_builder()
    changes = {"min_tokens": 4, "stop_token_ids": ints(8, 9)}
    for slot, output in enumerate(([], [5], [5, 6, 7, 5])):
        builder.add_sequence(slot, sequence(slot, [1, 2], output, **changes), BlockLease([[], []]))
    inits = builder.build().slot_inits
    assert inits is not None
    assert inits.num_endless.tolist() == [4, 3, 0]
    assert inits.end_starts.tolist() == [0, 2, 4, 4]
    assert inits.end_ids.tolist() == [8, 9, 8, 9]


@pytest.mark.parametrize(
    ("seed", "expected"),
    [
        (0, 0),
        (2**63 - 1, 2**63 - 1),
        (-(2**63), -(2**63)),
        (2**63, -(2**63)),
        (2**63 + 5, -(2**63) + 5),
    ],
)
def test_seeds_beyond_64_bits_wrap_around(seed: int, expected: int) -> None:
    builder = new_builder()
    builder.add_sequence(0, sequence(0, [1], [], seed), BlockLease([[], []]))
    inits = builder.build().slot_inits
    assert inits is not None
    assert inits.seed.tolist() == [expected]


@pytest.mark.parametrize(
    ("chunk_size", "max_prefill", "whole_prompts", "budget", "most", "flag"),
    [
        (16, 20, False, 16, 16, "--chunked-prefill-size"),
        (-1, 20, False, 20, 56, "--max-model-len"),
        (16, 20, True, 20, 56, "--max-model-len"),
        (16, 60, True, 60, 66, "--max-prefill-tokens"),
    ],
)
def test_step_respects_all_limits(
    chunk_size: int, max_prefill: int, whole_prompts: bool, budget: int, most: int, flag: str
) -> None:
    limits = SchedulerLimits(6, 50, chunk_size, max_prefill, 100, 64, whole_prompts=whole_prompts)
    assert limits.is_chunking == (limits.max_chunk is not None) == (budget == chunk_size)
    assert (limits.token_budget, limits.max_num_tokens) == (budget, most)
    assert limits.step_flag == flag
