"""Which process holds which expert of a layer, and how to balance the load of the processes.

The plan is that of the published expert parallelism load balancer (EPLB; arXiv:2412.19437, section 3.4) without groups
of experts: the experts with the highest load get replicas, and a greedy packing distributes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

UNUSED = -1  # instead of an expert
NUM_TURNS = 24  # divisible by the usual numbers of replicas, which take turns
MIN_GAIN = 0.05  # of the busiest process; a smaller one is not worth the moves


@dataclass(frozen=True, slots=True)
class Move:
    """A copy of an expert's weights from a slot of one process to a slot of another, or of the same one."""

    expert: int
    from_rank: int
    from_slot: int
    to_rank: int
    to_slot: int


def first_placement(num_experts: int, num_ranks: int, num_redundant: int) -> I32:
    """Return the placement before the first move, int32 [ranks, slots]: experts in order, then unused slots."""
    experts = np.arange(num_experts, dtype=np.int32).reshape(num_ranks, -1)
    return np.pad(experts, ((0, 0), (0, num_redundant // num_ranks)), constant_values=UNUSED)


def rebalance(loads: I64, current: I32) -> I32:
    """Return the planned placement, or the current one if the busiest process would hardly gain."""
    planned = plan_placement(loads, current)
    before, after = (rank_loads(loads, each).max() for each in (current, planned))
    return planned if after < before * (1 - MIN_GAIN) else current


def plan_placement(loads: I64, current: I32) -> I32:
    """Return a placement [ranks, slots] that balances the loads [experts], with every slot in use.

    Of all ways to give the same sets of experts to the processes, it takes one that leaves most in the current slots.
    """
    num_ranks, num_slots = current.shape
    replicas = count_replicas(loads, num_ranks * num_slots)
    packs = _pack(loads, replicas, num_ranks, num_slots)
    placement = np.full_like(current, UNUSED)
    left = list(range(num_ranks))
    for pack in packs:
        kept = [_num_common(pack, current[rank]) for rank in left]
        rank = left.pop(int(np.argmax(kept)))
        placement[rank] = _keep_slots(pack, current[rank])
    return placement


def count_replicas(loads: I64, num_slots: int) -> I32:
    """Return the replicas of each expert, at least one.

    Each further replica goes to the expert with the highest load per replica.
    """
    replicas = np.ones(len(loads), np.int32)
    for _ in range(num_slots - len(loads)):
        replicas[np.argmax(loads / replicas)] += 1
    return replicas


def rank_loads(loads: I64, placement: I32) -> npt.NDArray[np.float64]:
    """Return the load of each process. Replicas share the load of their expert."""
    used = placement[placement != UNUSED]
    replicas = np.bincount(used, minlength=len(loads))
    each = np.append(loads / np.maximum(replicas, 1), 0.0)  # the last one is that of an unused slot
    result: npt.NDArray[np.float64] = each[placement].sum(axis=1)
    return result


def find_moves(old: I32, new: I32) -> list[Move]:
    """Return the copies that lead from one placement to another, in the same order on all processes.

    All copies read the old contents. A process that holds an expert already copies its own.
    """
    sources: dict[int, list[tuple[int, int]]] = {}
    for rank, slot in np.argwhere(old != UNUSED).tolist():
        sources.setdefault(int(old[rank, slot]), []).append((rank, slot))
    moves = []
    for rank, slot in np.argwhere(new != old).tolist():
        expert = int(new[rank, slot])
        if expert != UNUSED:
            found = sources[expert]
            near = [source for source in found if source[0] == rank]
            # Several processes with the expert send in turn.
            source = near[0] if near else found[rank % len(found)]
            moves.append(Move(expert, *source, rank, slot))
    return moves


def place_table(placement: I32, num_experts: int) -> I32:
    """Return the place of an expert in each turn, int32 [experts, turns]: process * slots + slot."""
    table = np.empty((num_experts, NUM_TURNS), np.int32)
    for expert in range(num_experts):
        table[expert] = np.resize(np.flatnonzero(placement == expert), NUM_TURNS)
    return table


def turn_table(placement: I32, rank: int, num_experts: int) -> I32:
    """Return the slot of a process that computes an expert in each turn, int32 [experts, turns].

    The number of slots means that another process computes it.
    """
    num_slots = placement.shape[1]
    owners, slots = np.divmod(place_table(placement, num_experts), np.int32(num_slots))
    return np.where(owners == rank, slots, np.int32(num_slots))


def _pack(loads: I64, replicas: I32, num_ranks: int, num_slots: int) -> list[list[int]]:
    """Return the experts of each pack: the heaviest replica goes to the lightest pack with room, and so on."""
    experts = np.repeat(np.arange(len(loads)), replicas)
    weights = (loads / replicas)[experts]
    packs: list[list[int]] = [[] for _ in range(num_ranks)]
    totals = [0.0] * num_ranks
    for index in np.argsort(-weights, kind="stable").tolist():
        expert = int(experts[index])
        with_room = [rank for rank in range(num_ranks) if len(packs[rank]) < num_slots]
        # Of equally light packs, one without this expert.
        lightest = min(with_room, key=lambda rank: (totals[rank], expert in packs[rank]))
        packs[lightest].append(expert)
        totals[lightest] += float(weights[index])
    return packs


def _num_common(pack: Sequence[int], held: I32) -> int:
    """Return how many slots keep their expert."""
    return int(np.count_nonzero(_keep_slots(pack, held) == held))


def _keep_slots(pack: Sequence[int], held: I32) -> I32:
    """Return the slots of a process: experts that it already has keep their slots, and others fill the remaining slots."""
    slots = np.full(len(held), UNUSED, np.int32)
    rest = list(pack)
    for slot, expert in enumerate(held.tolist()):
        if expert in rest:
            slots[slot] = expert
            rest.remove(expert)
    slots[slots == UNUSED] = rest
    return slots
