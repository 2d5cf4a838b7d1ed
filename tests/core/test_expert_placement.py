"""The balance of experts: every expert stays available, and plans balance the load."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenspeed_core.executor.expert_placement import (
    NUM_TURNS,
    UNUSED,
    count_replicas,
    find_moves,
    first_placement,
    plan_placement,
    rank_loads,
    rebalance,
    turn_table,
)

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]


@st.composite
def cases(draw: st.DrawFn) -> tuple[I32, list[I64]]:
    """Draw the first placement and some loads, one after another."""
    num_ranks, per_rank, spare = (draw(st.integers(*each)) for each in ((2, 5), (1, 4), (0, 3)))
    placement = first_placement(num_ranks * per_rank, num_ranks, num_ranks * spare)
    sizes = {"min_size": num_ranks * per_rank, "max_size": num_ranks * per_rank}
    each = st.lists(st.integers(0, 1000), **sizes)
    return placement, [np.asarray(loads) for loads in draw(st.lists(each, min_size=1, max_size=3))]


@given(cases())
def test_plans_keep_all_experts_and_use_all_slots(case: tuple[I32, list[I64]]) -> None:
    placement, history = case
    for loads in history:
        planned = plan_placement(loads, placement)
        assert planned.shape == placement.shape
        assert set(planned.flatten().tolist()) == set(range(len(loads)))
        replicas = np.bincount(planned.flatten(), minlength=len(loads))
        assert (replicas == count_replicas(loads, placement.size)).all()
        placement = planned


@given(cases())
def test_replicas_lower_the_highest_load_of_an_expert(case: tuple[I32, list[I64]]) -> None:
    placement, (loads, *_) = case
    replicas = count_replicas(loads, placement.size)
    shares = loads / replicas
    # Taking a replica away gives the expert at least the highest share that is left.
    assert all(
        loads[expert] / (replicas[expert] - 1) >= shares.max()
        for expert in range(len(loads))
        if replicas[expert] > 1
    )


@given(cases())
def test_busiest_process_has_at_most_the_mean_and_one_expert_more(
    case: tuple[I32, list[I64]],
) -> None:
    placement, (loads, *_) = case
    num_slots = placement.shape[1]
    shares = loads / count_replicas(loads, placement.size)
    found = rank_loads(loads, plan_placement(loads, placement))
    assert np.isclose(found.sum(), loads.sum())
    # The bound of a greedy packing whose packs have equal numbers of items.
    assert found.max() - found.min() <= shares.max() * (1 + 1e-9)
    assert num_slots > 1 or np.isclose(found.max(), shares.max())


@given(cases())
def test_moves_lead_to_the_planned_placement(case: tuple[I32, list[I64]]) -> None:
    placement, history = case
    for loads in history:
        planned = plan_placement(loads, placement)
        held, before = placement.copy(), placement
        for move in find_moves(placement, planned):
            assert before[move.from_rank, move.from_slot] == move.expert
            held[move.to_rank, move.to_slot] = move.expert
        assert (held == planned).all()
        assert find_moves(planned, planned) == []
        placement = planned


@given(cases())
def test_each_turn_of_an_expert_has_one_slot(case: tuple[I32, list[I64]]) -> None:
    first, (loads, *_) = case
    for placement in (first, plan_placement(loads, first)):
        num_ranks, num_slots = placement.shape
        tables = [turn_table(placement, rank, len(loads)) for rank in range(num_ranks)]
        for expert in range(len(loads)):
            used = set()
            for turn in range(NUM_TURNS):
                found = [
                    (rank, int(table[expert, turn]))
                    for rank, table in enumerate(tables)
                    if table[expert, turn] < num_slots
                ]
                assert len(found) == 1
                assert placement[found[0]] == expert
                used.add(found[0])
            assert len(used) == min(NUM_TURNS, np.count_nonzero(placement == expert))


# Of 12 experts, of which some have replicas: the example of deepseek-ai/EPLB, and what its code packs together without
# groups of experts. Loads that are equal may be packed in another order and are left out.
FIRST = [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86]
SECOND = [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27]


@pytest.mark.parametrize(
    ("loads", "packs"),
    [
        (FIRST, [[0, 2], [1, 1], [3, 8], [4, 5], [4, 11], [5, 9], [6, 10], [7, 10]]),
        (FIRST, [[0, 2, 4, 5], [1, 1, 4, 10], [3, 7, 8, 10], [5, 6, 9, 11]]),
        (FIRST, [[0, 3, 5, 6], [1, 2, 4, 8], [7, 9, 10, 11]]),
        (SECOND, [[0, 7, 8, 11], [1, 6, 9, 10], [2, 3, 4, 5]]),
        (
            SECOND,
            [[0, 2, 6, 7, 8, 9], [1, 1, 2, 3, 9, 11], [4, 5, 5, 6, 7, 8], [5, 5, 6, 7, 8, 10]],
        ),
    ],
)
def test_packing_matches_the_published_algorithm(loads: list[int], packs: list[list[int]]) -> None:
    current = np.full((len(packs), len(packs[0])), UNUSED, np.int32)
    planned = plan_placement(np.asarray(loads), current)
    assert sorted(sorted(each) for each in planned.tolist()) == packs


def test_balanced_loads_move_nothing() -> None:
    placement = first_placement(8, 2, 0)
    assert rebalance(np.full(8, 10), placement) is placement
    skewed = np.asarray([100, 100, 1, 1, 1, 1, 1, 1])
    assert rank_loads(skewed, rebalance(skewed, placement)).tolist() == [103, 103]
