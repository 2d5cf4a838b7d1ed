"""The process groups of each process."""

from __future__ import annotations

import pytest

from tokenspeed_core.api import ONE_PROCESS, ParallelLayout


def test_one_process_is_alone_in_each_group() -> None:
    assert ONE_PROCESS.world_size == 1
    assert {group.size for group in ONE_PROCESS.groups.values()} == {1}


def test_expert_groups_cross_groups_of_features() -> None:
    layout = ParallelLayout.of(2, attn=4, dense=4, moe=2, experts=2)
    moe, experts = layout.group("moe"), layout.group("experts")
    assert (moe.ranks, moe.rank) == ((2, 3), 0)
    assert (experts.ranks, experts.rank) == ((0, 2), 1)
    assert layout.group("attn").ranks == layout.group("world").ranks == (0, 1, 2, 3)


def test_part_of_the_model_may_be_replicated() -> None:
    layout = ParallelLayout.of(1, attn=2, experts=2)
    assert layout.group("dense").ranks == (1,)
    assert layout.group("experts").ranks == (0, 1)


def test_groups_of_mlps_divide_an_engine() -> None:
    layouts = [ParallelLayout.of(rank, attn=4, dense=2, experts=8, data=2) for rank in range(8)]
    assert [layout.group("dense").ranks for layout in layouts[::2]] == [
        (0, 1),
        (2, 3),
        (4, 5),
        (6, 7),
    ]
    assert [layout.group("dense").rank for layout in layouts] == [0, 1] * 4
    assert layouts[5].group("attn").ranks == (4, 5, 6, 7)


def test_engines_of_several_processes_share_experts_only() -> None:
    layout = ParallelLayout.of(3, attn=2, experts=4, data=2)
    ranks = {name: layout.group(name).ranks for name in layout.groups}
    assert ranks == {
        "attn": (2, 3),
        "dense": (3,),
        "moe": (3,),
        "experts": (0, 1, 2, 3),
        "data": (1, 3),
        "engine": (2, 3),
        "world": (0, 1, 2, 3),
    }
    assert layout.group("data").rank == 1


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ({"attn": 4, "dense": 3}, "dense"),
        ({"attn": 2, "dense": 4}, "attn"),
        ({"attn": 4, "moe": 2}, "moe"),
        ({"attn": 0}, "one"),
        ({"experts": 3, "data": 2}, "2 engines"),
        ({"attn": 2, "experts": 2, "data": 2}, "moe x experts"),
        ({"attn": 4, "experts": 4, "data": 2}, "moe x experts"),
    ],
)
def test_unequal_groups_are_refused(sizes: dict[str, int], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        ParallelLayout.of(0, **sizes)


def test_rank_outside_the_world_and_unknown_group_are_refused() -> None:
    with pytest.raises(ValueError, match="rank 2"):
        ParallelLayout.of(2, attn=2)
    with pytest.raises(ValueError, match="'tensor'"):
        ONE_PROCESS.group("tensor")
