"""The tensors of a step: eager inputs equal those of a padded bucket."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tokenspeed_testing.plans import PlanMaker

from tokenspeed_core.api.step import StepPlan
from tokenspeed_core.worker.inputs import EagerInputs, StepBuffers, begin_step
from tokenspeed_core.worker.sampler import RunnerKernels
from tokenspeed_core.worker.slots import SlotLayout, SlotState
from tokenspeed_core.worker.staged import BucketSize, StagedLayout
from tokenspeed_core.worker.transfer import HostTransfer
from tokenspeed_kernels.reference.cache import advance_rows, gather_tokens, map_tokens

BLOCK, GROUPS = 4, 2
NUM_BLOCKS = 8
KERNELS = RunnerKernels(
    print,
    {},
    {},
    {},
    advance_rows({}),
    map_tokens({"block_size": BLOCK}),
    gather_tokens({}),
    print,
)
STEPS: tuple[tuple[tuple[str, ...], dict[str, int]], ...] = (
    ((), {"a": 3, "c": 1}),
    (("c",), {"a": 7, "b": 2}),
    (("c", "a"), {"b": 5}),
    (("b", "c", "a"), {}),
    (("a",), {}),
)


def make_state() -> SlotState:
    layout = SlotLayout(num_slots=6, num_blocks=NUM_BLOCKS, num_groups=GROUPS, max_drafts=3)
    state = SlotState(layout, torch.device("cpu"))
    state.reset((99,) * GROUPS)
    state.last_token[:] = torch.arange(50, 56, dtype=torch.int32)
    return state


def make_eager(state: SlotState, split: tuple[bool, ...] = (False, False)) -> EagerInputs:
    return EagerInputs(state, KERNELS, BLOCK, split, HostTransfer())


def make_plans() -> PlanMaker:
    plans = PlanMaker(BLOCK, (1,) * GROUPS)
    plans.add("a", list(range(10)), 4, temperature=0.5, seed=-1)
    plans.add("b", list(range(20, 27)), 1, top_k=5)
    plans.add("c", [30], 0)
    return plans


def make_buffers(size: BucketSize, columns: dict[str, torch.Tensor]) -> StepBuffers:
    empty = torch.zeros((2, size.num_tokens), dtype=torch.int64)
    return StepBuffers(
        token_ids=columns.get("ids", empty[0]),
        positions=columns.get("positions", empty[1]),
        seq_lens=torch.zeros(size.num_rows, dtype=torch.int32),
        new_positions=torch.zeros(size.num_sampled, dtype=torch.int64),
        tables=[torch.zeros((size.num_rows, NUM_BLOCKS), dtype=torch.int32) for _ in range(GROUPS)],
        kv_slots=[torch.zeros(size.num_tokens, dtype=torch.int64) for _ in range(GROUPS)],
    )


def begin_padded(
    state: SlotState, plan: StepPlan, size: BucketSize
) -> tuple[dict[str, torch.Tensor], StepBuffers]:
    """Begin a step in the layout of a bucket. Returns its columns and buffers."""
    words, values = state.layout.writes(plan)
    layout = StagedLayout(size, len(words) + 2)
    host = np.zeros(layout.num_int64, np.int64)
    layout.fill(host, plan, words, values, state.layout)
    columns = dict(layout.columns(torch.from_numpy(host)))
    buffers = make_buffers(size, columns)
    begin_step(state, KERNELS, columns, size, buffers)
    return columns, buffers


def test_eager_step_equals_a_padded_bucket() -> None:
    eager_state, state = make_state(), make_state()
    eager = make_eager(eager_state)
    plans = make_plans()
    for decodes, chunks in STEPS:
        plan = plans.plan(decodes, chunks)
        found = eager.make(plan)
        size = BucketSize(4, 3, 12) if chunks else BucketSize(4, 0, 0)
        columns, buffers = begin_padded(state, plan, size)
        num_chunk_rows, num_chunk_tokens = plan.num_rows - plan.num_decodes, len(plan.token_ids)
        rows = [*range(plan.num_decodes), *range(4, 4 + num_chunk_rows)]
        tokens = [*range(plan.num_decodes), *range(4, 4 + num_chunk_tokens)]
        assert torch.equal(found.token_ids, buffers.token_ids[tokens])
        assert torch.equal(found.positions, buffers.positions[tokens])
        for group, table, kv_slots in zip(
            found.groups, buffers.tables, buffers.kv_slots, strict=True
        ):
            assert torch.equal(group.kv_slots, kv_slots[tokens])
            assert torch.equal(group.step.seq_lens, buffers.seq_lens[rows])
            width = group.step.block_table.shape[1]
            assert torch.equal(group.step.block_table, table[rows][:, :width])
            assert width * BLOCK >= group.step.max_seq_len
        sampled = np.flatnonzero(plan.wants_logits)
        sampled_rows = [rows[row] for row in sampled]
        assert found.rows.plan_rows.tolist() == sampled.tolist()
        assert found.rows.slots.tolist() == plan.slots[sampled].tolist()
        assert torch.equal(found.rows.device_slots, columns["slots"][sampled_rows])
        assert torch.equal(found.rows.new_positions, buffers.new_positions[sampled_rows])
        assert torch.equal(eager_state.words, state.words)
    assert state.seq_len.tolist() == [4, 8, 0, 0, 13, 0]
    assert state.seed[4] == -1
    assert state.temperature[4] == 0.5
    assert state.top_k[1] == 5


def with_drafts(plan: StepPlan, num_drafts: tuple[int, ...], *, on_device: bool) -> StepPlan:
    """Add draft tokens to the decodes of a plan. Their blocks exist."""
    counts, total = plan.num_query_tokens.copy(), sum(num_drafts)
    counts[: len(num_drafts)] += np.array(num_drafts, np.int32)
    ids = None if on_device else np.arange(700, 700 + total, dtype=np.int32)
    return replace(plan, num_query_tokens=counts, num_draft_tokens=total, draft_token_ids=ids)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("chunks", [{}, {"b": 3}, {"b": 7}, {"b": 3, "d": 2}])
def test_eager_drafts_equal_those_of_a_padded_bucket(
    chunks: dict[str, int], on_device: bool
) -> None:
    states, plans = (make_state(), make_state()), make_plans()
    plans.add("d", [40, 41], 3)
    prompts = plans.plan((), {"a": 10, "c": 1})
    for state in states:
        state.drafts[:] = torch.arange(800, 818, dtype=torch.int32).view(6, 3)
        make_eager(state).make(prompts)
    plan = with_drafts(plans.plan(("c", "a"), chunks), (1, 2), on_device=on_device)
    size = BucketSize(4, 3, 12, num_draft_tokens=5)
    eager = make_eager(states[0]).make(plan)
    columns, padded = begin_padded(states[1], plan, size)

    rows = [0, 1, 4, 5][: plan.num_rows]
    tokens = [*range(5), *range(9, 9 + len(plan.token_ids))]
    assert torch.equal(eager.token_ids, padded.token_ids[tokens])
    assert torch.equal(eager.positions, padded.positions[tokens])
    for group, table, kv_slots in zip(eager.groups, padded.tables, padded.kv_slots, strict=True):
        assert group.num_decodes == 0  # all rows are served as chunks
        assert torch.equal(group.kv_slots, kv_slots[tokens])
        assert torch.equal(group.step.seq_lens, padded.seq_lens[rows])
        width = group.step.block_table.shape[1]
        assert torch.equal(group.step.block_table, table[rows][:, :width])
    assert torch.equal(states[0].words, states[1].words)
    # The last token of slot 0 and its draft, then those of slot 4.
    drafts = [800, 812, 813] if on_device else [700, 701, 702]
    assert eager.token_ids[:5].tolist() == [50, drafts[0], 54, *drafts[1:]]
    assert eager.positions[:5].tolist() == [1, 2, 10, 11, 12]

    sampled = np.flatnonzero(plan.wants_logits)
    logits = [*range(5), *(9 + row - 2 for row in sampled[2:])]
    assert torch.equal(eager.rows.new_positions, padded.new_positions[logits])
    assert eager.rows.device_slots.tolist() == eager.rows.slots.tolist()
    assert eager.rows.last is not None
    assert (
        eager.token_ids[eager.rows.last].tolist()
        == padded.token_ids[columns["last"][logits]].tolist()
    )
    found = eager.rows.drafts
    assert found is not None
    assert found.slots.tolist() == plan.slots[sampled].tolist()
    assert (
        found.ends.tolist() == (plan.num_computed_tokens + plan.num_query_tokens)[sampled].tolist()
    )
    assert (
        found.offsets.tolist()
        == found.host.offsets.tolist()
        == [0, 1, 0, 1, 2, *[0] * len(sampled[2:])]
    )
    assert (
        found.num_drafts.tolist()
        == found.host.num_drafts.tolist()
        == [1, 2, *[0] * len(sampled[2:])]
    )
    assert found.first.tolist() == [0, 2, 5, 6][: len(sampled)]
    assert eager.rows.plan_rows.tolist() == [0, 0, 1, 1, 1, *sampled[2:]]


def test_each_last_token_has_logits() -> None:
    eager, plans = make_eager(make_state()), make_plans()
    found = []
    for decodes, chunks in STEPS:
        index = eager.make(plans.plan(decodes, chunks)).rows.last
        found.append(None if index is None else index.tolist())
    assert found == [[3], [0, 7], [0, 1, 6], None, None]


@pytest.mark.parametrize("split", [False, True])
def test_mixed_step_may_come_in_two_parts(split: bool) -> None:
    eager, plans = make_eager(make_state(), (split, False)), make_plans()
    for decodes, chunks in STEPS[:1]:
        eager.make(plans.plan(decodes, chunks))
    inputs = eager.make(plans.plan(("c",), {"a": 7, "b": 2}))
    whole = inputs.groups[1].step
    assert whole.host_query_start == (0, 1, 8, 10)
    assert whole.query_start.tolist() == [0, 1, 8, 10]
    assert whole.host_seq_lens == (2, 10, 2)
    assert (whole.num_rows, whole.num_tokens, whole.max_num_query, whole.max_seq_len) == (
        3,
        10,
        7,
        10,
    )
    decodes, prefills = inputs.groups[0].decodes, inputs.groups[0].prefills
    assert (decodes is None) == (prefills is None) == (not split)
    if decodes is not None and prefills is not None:
        assert decodes.query_start.tolist() == [0, 1]
        assert decodes.seq_lens.tolist() == [2]
        assert prefills.query_start.tolist() == [0, 7, 9]
        assert prefills.host_query_start == (0, 7, 9)
        assert prefills.seq_lens.tolist() == [10, 2]


def test_kv_slot_is_the_position_in_its_block() -> None:
    plans = PlanMaker(BLOCK, (1,) * GROUPS)
    plans.add("a", list(range(10)), 4).blocks = [[7, 3], [5, 6]]
    inputs = make_eager(make_state()).make(plans.plan(chunks={"a": 6}))
    assert inputs.groups[0].kv_slots.tolist() == [28, 29, 30, 31, 12, 13]
    assert inputs.groups[1].kv_slots.tolist() == [20, 21, 22, 23, 24, 25]
    assert inputs.groups[0].step.block_table.tolist() == [[7, 3]]
